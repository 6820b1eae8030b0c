"""Finds the source of an infinite or NaN loss or norm, after it has occurred."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.axes.grid import Grid
from distlab.comm.names import CONTROL, named
from distlab.comm.together import texts_of_all
from distlab.run.forward_passes import forward_passes
from distlab.run.model import ModelParts


def first_rank(own_loss: float, grid: Grid, ranks: int, device: torch.device) -> str:
    """Return the first rank whose loss is not finite, for a message; all ranks must call this function."""
    first = torch.tensor(ranks if math.isfinite(own_loss) else grid.rank, device=device)
    with named("the first rank whose loss is not finite", CONTROL):
        dist.all_reduce(first, dist.ReduceOp.MIN)
    return f", first on {grid.describe(int(first))}" if first < ranks > 1 else ""


def find_in_step(parts: ModelParts, step: int, micro_batches: Sequence[Tensor]) -> str:
    """Repeat the forward pass of a step, and name the first non-finite tensor; see `find_cause`."""
    name = f"the activations of micro-batch {{}} again, to find what is not finite in step {step}".format
    forward = partial(forward_passes, parts, micro_batches, name, kind=CONTROL)
    return find_cause(parts.stages, parts.by_stage(), forward, parts.grid)


def find_cause(
    stages: Mapping[int, nn.Module],
    parameters: Iterable[tuple[int, str, Tensor]],
    forward: Callable[[], object],
    grid: Grid,
) -> str:
    """Name the first non-finite tensor. All ranks must call this function; the result is the same on all of them.

    Parameters come first, because the previous update made them non-finite. Outputs of modules follow in the order in
    which they are computed: by stage, then by rank. `stages` are this rank's parts of the model, whose modules have
    their names in the whole model. `parameters` are the parameters that it updates, with their stages and names.
    `forward` repeats the forward pass of this step on all ranks together.
    """
    broken = [(stage, name) for stage, name, parameter in parameters if not parameter.isfinite().all()]
    found = [(stage, f"parameter {name}, since the previous update") for stage, name in broken]
    found += outputs_not_finite(stages, forward)
    firsts = _tell_all(found)
    if not firsts:
        return "all parameters and activations are finite, only the loss is not"
    culprit = min(firsts, key=lambda rank: (firsts[rank][1].startswith("output"), firsts[rank][0]))
    return _sentence(firsts[culprit][1], culprit, grid)


def find_gradient(parameters: Iterable[tuple[int, str, Tensor]], grid: Grid) -> str:
    """Name the first gradient that is not finite, in the same words on all ranks; all of them must call this.

    The order is the backward pass's: the last parameter of the last stage first, and among ranks the smallest.
    `parameters` are as for `find_cause`.
    """
    gradients = [(stage, name, parameter.grad) for stage, name, parameter in parameters if parameter.grad is not None]
    broken = [(stage, f"gradient of {name}") for stage, name, grad in gradients if not grad.isfinite().all()]
    firsts = _tell_all(broken[::-1])
    if not firsts:
        return "no parameter has a gradient that is not finite"
    culprit = max(firsts, key=lambda rank: (firsts[rank][0], -rank))
    return _sentence(firsts[culprit][1], culprit, grid)


def _tell_all(found: Sequence[tuple[int, str]]) -> dict[int, tuple[int, str]]:
    """Return the stage and the name of each rank's first tensor that is not finite, by the ranks that have one."""
    told = texts_of_all(json.dumps(found[:1]), "the first non-finite tensor of each rank")
    return {rank: (stage, what) for rank, own in enumerate(told) for stage, what in json.loads(own)}


def _sentence(what: str, culprit: int, grid: Grid) -> str:
    text = f"the first non-finite tensor is the {what}"
    return f"{text}, on {grid.describe(culprit)}" if dist.get_world_size() > 1 else text


def outputs_not_finite(stages: Mapping[int, nn.Module], forward: Callable[[], object]) -> list[tuple[int, str]]:
    """Return the modules with non-finite outputs in `forward()`, with their stages, in the order of computation."""
    found: list[tuple[int, str]] = []

    def look(stage: int, name: str, module: nn.Module, _: object, output: object) -> None:
        if isinstance(output, Tensor) and not output.isfinite().all():
            found.append((stage, f"output of {name or 'the model'} ({type(module).__name__})"))

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for stage, part in stages.items():
            for name, module in part.named_modules():
                hooks.enter_context(module.register_forward_hook(partial(look, stage, name)))
        forward()
    return found
