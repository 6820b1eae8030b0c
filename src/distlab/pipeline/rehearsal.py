"""Actions on made-up inputs, without other stages: to load what they need before a run, or to measure them."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from distlab.pipeline.actions import Action
from distlab.pipeline.activations import MicroBatch


def rehearse(
    actions: Sequence[Action], on: Callable[[Action], MicroBatch], stages: int, width: int
) -> Iterator[tuple[Action, float]]:
    """Run actions one after another, and yield each with its seconds; what other stages would send is zeros.

    Args:
        on: the micro-batch of an action, on its stage.
        stages: number of stages of the pipeline.
        width: width of the activations between them: (batch, seq, `width`).
    """
    for action in actions:
        action.prepare(on(action))
    for action in actions:
        here = on(action)
        device, needed = here.ids.device, [one for one in action.needs(stages) if one.stage != action.stage]
        received = [torch.zeros(*here.ids.shape, width, device=device) for _ in needed]
        started = now(device)
        action.run(here, *received)
        yield action, now(device) - started


def now(device: torch.device) -> float:
    """Return the time after waiting for all work that was started on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
