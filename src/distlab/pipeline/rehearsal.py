"""Actions on made-up inputs, without other stages: to load what they need before a run, or to measure them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from distlab.axes.shards import ReplicaShards
from distlab.comm.names import CONTROL, counted_as
from distlab.pipeline.actions import Action
from distlab.pipeline.activations import MicroBatch, PartOf, Stage
from simplellm.experts import equal_loads


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


def warm_up(
    program: Sequence[Action], held: Mapping[int, Stage], ids: Tensor, part_of: PartOf | None, stages: int, width: int
) -> None:
    """Before the first message over NCCL, run the actions of a micro-batch on each stage that is held here, on zeros.

    CUDA loads a kernel at its first use ("lazy loading" in NVIDIA's CUDA C++ Programming Guide), and may wait until the
    GPU is idle to do so. While a message is on its way the GPU is busy, and the message's other end may need a result
    of this rank first: a deadlock. So every kind of action runs twice, as the second time adds to gradients.

    Args:
        ids: token ids of a micro-batch, (batch, seq).
        part_of, width: as of `distlab.pipeline.executor.Pipeline`.
        stages: number of stages of the pipeline.
    """
    part = part_of(ids) if part_of else None
    ids = ids if part is None else part.ids
    # Neither the messages of these passes nor the tokens of experts in them are part of training.
    with counted_as(CONTROL), equal_loads(stage.net for stage in held.values()):
        for index, stage in held.items():
            if isinstance(stage.net, ReplicaShards) and stage.net.shard == "weights":
                x = torch.zeros(*ids.shape, width, device=ids.device, requires_grad=True)
                stage.rehearse_sharded(ids, x if index else ids, part)
                continue
            with stage.rehearsed() as rehearsed:
                for actions in 2 * _kinds_of_passes(program, index):
                    here = dict.fromkeys(actions, MicroBatch(rehearsed, ids, part=part))
                    for _ in rehearse(actions, here.__getitem__, stages, width):
                        pass


def _kinds_of_passes(program: Sequence[Action], stage: int) -> list[list[Action]]:
    """Return the actions on a stage for one of the micro-batches that have the same kinds of actions, for each."""
    passes: dict[int, list[Action]] = {}
    for action in program:
        if action.stage == stage:
            passes.setdefault(action.micro_batch, []).append(action)
    return [*{tuple(map(type, actions)): actions for actions in passes.values()}.values()]
