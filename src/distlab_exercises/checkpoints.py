"""Tries the functions that name and place the tensors of ranks in a checkpoint, in several layouts.

The ranks take turns in one process, and the checkpoint is a dictionary of whole tensors. The same functions read it, so
their results must be the memory of the model and its optimizer.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distlab.axes.placement import DimSlice, Placement, place
from distlab.checkpoints.slices import Slice
from distlab.run.terminal import counted
from distlab_exercises.loading import Solution
from distlab_exercises.verdict import Wrong, expect

SHAPES = {"embed.weight": (7, 4), "layers.0.up.weight": (6, 4), "layers.1.down.weight": (4, 6), "norm.weight": (4,)}
SPLIT = {"embed.weight": 0, "layers.0.up.weight": 0, "layers.1.down.weight": 1}  # along which dimension
LAYOUTS = [(2, 2), (1, 1), (1, 3), (4, 1)]  # stages, slices of each
Rank = tuple[dict[str, nn.Parameter], torch.optim.Adam]  # its parameters and their optimizer


def try_checkpoint(solution: Solution) -> list[str]:
    """Try `as_held` with each tensor of a rank, or `state_of` with all of them."""
    if solution.name == "as_held":
        state_of = _state_by(solution.function)
        right = "each slice has its place in the whole, and shares its memory"
        plain = nn.Parameter(torch.zeros(2, 2))
        held = solution.function(plain.detach(), plain)
        is_plain = isinstance(held, Tensor) and not isinstance(held, Slice) and held.data_ptr() == plain.data_ptr()
        expect(is_plain, "no-slice-needed", "a parameter that is no slice is held whole: return it as it is")
    else:
        state_of = solution.function
        right = "every rank of every layout reads what it should hold"
    for layout in LAYOUTS:
        _try_layout(state_of, *layout)
    return [right]


def _state_by(as_held: Callable[[Tensor, nn.Parameter], Any]) -> Callable[..., dict[str, Any]]:
    """Return a right `state_of` with a student's `as_held`."""

    def state_of(parameters: Mapping[str, nn.Parameter], optimizer: Any, rank: int, _: bool) -> dict[str, Any]:
        held = {name: as_held(tensor, parameter) for name, tensor, parameter in _held_by((dict(parameters), optimizer))}
        return held | {f"random.{rank}.cpu": torch.get_rng_state()}

    return state_of


def _try_layout(state_of: Callable[..., Any], stages: int, slices: int) -> None:
    """Collect each rank's tensors, and put them together."""
    written: dict[str, Tensor] = {}
    truth = {name: tensor.double() for name, tensor, _ in _held_by(next(_ranks(1, 1)))}  # of one process
    where = f"{counted(stages, 'stages')} of {counted(slices, 'slices')}"
    for number, (parameters, optimizer) in enumerate(_ranks(stages, slices)):
        generator, random = torch.get_rng_state(), f"random.{number}.cpu"
        state = state_of(parameters, optimizer, number, False)
        is_mapping = isinstance(state, Mapping)
        expect(is_mapping, "no-dictionary", f"returned {type(state).__name__}, and should return tensors by name")
        for name, held in state.items():
            _write(name, held, written, truth, f"rank {number}'s {name}")
        told = f"rank {number} does not write the state of its random generator, {random}"
        expect(random in state, "missing", told)
        is_state = state[random].dtype == generator.dtype and torch.equal(state[random], generator)
        expect(is_state, "random", f"{random} is not the state of torch's generator, which set_rng_state could get")
        for name, tensor, _ in _held_by((parameters, optimizer)):
            if (held := state.get(name)) is None:
                continue
            if isinstance(held, Slice) and tensor.dim() == 0:
                raise Wrong("step-in-slices", "`step`, one number, belongs to the whole parameter: return it as it is")
            views = held.views.values() if isinstance(held, Slice) else [held]
            if any(view.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() for view in views):
                told = f"{where}: rank {number}'s {name} does not get what was written: what is returned is a copy"
                raise Wrong("not-read", told)
    others = [other for other in written if other not in truth and not other.startswith("random.")]
    instead = f"; instead there is {min(others)}" if others else ""
    for name in truth:
        expect(name in written, "missing", f"no rank writes {name}{instead}")
        expect(not written[name].isnan().any(), "missing", f"{where}: a part of {name} is not written by any rank")


def _write(name: str, held: object, written: dict[str, Tensor], truth: Mapping[str, Tensor], what: str) -> None:
    """Put a rank's tensor in its place; NaN marks elements that no rank has written yet."""
    if not isinstance(held, Tensor):
        raise Wrong("no-tensor", f"{what}: is {type(held).__name__}, and should be a tensor")
    whole, views = (held.whole, held.views) if isinstance(held, Slice) else (held.shape, {(0,) * held.dim(): held})
    into = written.setdefault(name, torch.full(tuple(whole), torch.nan, dtype=torch.float64))
    right = truth.get(name)
    for offsets, view in views.items():
        region = tuple(slice(offset, offset + size) for offset, size in zip(offsets, view.shape, strict=False))
        told = f"{what}: a slice {tuple(view.shape)} at {tuple(offsets)} of {tuple(into.shape)}"
        expect(into.dim() == view.dim() and into[region].shape == view.shape, "outside", f"{told} lies outside of it")
        is_old = ~into[region].isnan()
        same = f"{what} is another tensor than what a rank before has written by this name"
        rule = "a name must be that of the whole model, and a slice must have its place"
        expect(torch.equal(into[region][is_old], view.double()[is_old]), "collision", f"{same}: {rule}")
        into[region] = view.double()
        if right is not None:
            shapes = f"{what}: the whole is said to be {tuple(into.shape)}, and is {tuple(right.shape)}"
            expect(into.shape == right.shape, "shape", shapes)
            expect(torch.equal(right[region], view.double()), "wrong-place", f"{told} is put in the place of another")


def _whole(name: str) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(SHAPES[name]).numel()).view(SHAPES[name]) + 100 * list(SHAPES).index(name)


def _held_by(rank: Rank) -> Iterator[tuple[str, Tensor, nn.Parameter]]:
    """Yield global name, tensor and parameter of everything that a rank writes."""
    parameters, optimizer = rank
    for name, parameter in parameters.items():
        yield name, parameter.detach(), parameter
        for key, value in optimizer.state[parameter].items():
            yield f"optimizer.{name}.{key}", value, parameter


def _ranks(stages: int, slices: int) -> Iterator[Rank]:
    """Yield each rank of a layout: its stage's parameters, or slices of them, and their Adam state."""
    for stage in range(stages):
        names = [name for number, name in enumerate(SHAPES) if number * stages // len(SHAPES) == stage]
        for own in range(slices):
            parameters = {name: _parameter(name, own, slices) for name in names}
            optimizer = torch.optim.Adam(parameters.values())
            for name, parameter in parameters.items():  # each moment is a multiple of its parameter
                moments = {"exp_avg": 2 * parameter.detach(), "exp_avg_sq": 3 * parameter.detach()}
                optimizer.state[parameter] = {"step": torch.tensor(3.0 + list(SHAPES).index(name)), **moments}
            yield parameters, optimizer


def _parameter(name: str, own: int, slices: int) -> nn.Parameter:
    whole, dim = _whole(name), SPLIT.get(name)
    if dim is None or slices == 1:
        return nn.Parameter(whole)
    parts = whole.tensor_split(slices, dim)
    parameter = nn.Parameter(parts[own].clone())
    start = sum(part.shape[dim] for part in parts[:own])
    place(parameter, Placement((DimSlice(dim, start, whole.shape[dim], ("tp",)),)))
    return parameter
