"""Tries the functions that name and place what ranks write to a checkpoint: writes it in a layout, reads it in others.

The ranks take turns in one process, and the checkpoint is a dictionary of whole tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlab.checkpoints.slices import Slice
from distlab.comm.placement import DimSlice, Placement, place, placement_of
from distlab_exercises.loading import load
from distlab_exercises.verdict import Verdict, Wrong

SHAPES = {"embed.weight": (7, 4), "layers.0.up.weight": (6, 4), "layers.1.down.weight": (4, 6), "norm.weight": (4,)}
SPLIT = {"embed.weight": 0, "layers.0.up.weight": 0, "layers.1.down.weight": 1}  # along which dimension
WRITTEN, READ = (2, 2), [(1, 1), (1, 3), (4, 1)]  # stages, slices of each
OPTIMIZER = "optimizer."
Rank = tuple[dict[str, nn.Parameter], torch.optim.Adam]  # what it holds


def try_checkpoint(script: Path, module: str, name: str) -> Verdict:
    """Try `as_held` with single tensors, or `state_of` with a checkpoint that one layout writes and others read."""
    del module
    student = load(script)
    if name == "as_held":
        verdict = Verdict("as_held: slices of rows and of columns")
        found, right = _wrong_place(student.as_held), "each slice has its place in the whole, and shares its memory"
    else:
        verdict = Verdict("state_of: written by 2 stages of 2 slices, read in three other layouts")
        found, right = _wrong_state(student.state_of), "every rank of every layout reads what it should hold"
    return verdict.judged(found, right)


def _wrong_place(as_held: Any) -> Wrong:
    for name, dim in SPLIT.items():
        whole = _whole(name)
        for start, part in _slices(whole, dim, 3):
            parameter, what = _sliced(part, dim, start, whole), f"rows {start} to {start + part.shape[dim] - 1}"
            what = f"{what if dim == 0 else what.replace('rows', 'columns')} of {tuple(whole.shape)}"
            held = as_held(parameter.detach(), parameter)
            if not isinstance(held, Slice):
                return "no-slice", f"{what}: returned {type(held).__name__}, and should return a Slice"
            if held.whole != whole.shape:
                return "whole", f"{what}: the whole is said to be {tuple(held.whole)}"
            copy = torch.full_like(whole, torch.nan)
            if (found := _write("it", held, {"it": copy}, what)) is not None:
                return found
            right = torch.full_like(whole, torch.nan)
            right.narrow(dim, start, part.shape[dim]).copy_(part)
            if not torch.equal(copy.nan_to_num(99), right.nan_to_num(99)):
                return "wrong-place", f"{what} are put elsewhere in the whole"
            if all(view.untyped_storage().data_ptr() != parameter.data_ptr() for view in held.views.values()):
                return "copy", f"{what}: returned a copy; what is read into it would not reach the parameter"
            step = torch.tensor(3.0)
            if as_held(step, parameter) is not step:
                return "step-in-slices", "`step`, one number, belongs to the whole parameter: return it as it is"
    plain = nn.Parameter(torch.zeros(2, 2))
    held = as_held(plain.detach(), plain)
    is_plain = isinstance(held, Tensor) and not isinstance(held, Slice) and held.data_ptr() == plain.data_ptr()
    return None if is_plain else ("no-slice-needed", "a parameter that is no slice is held whole: return it as it is")


def _wrong_state(state_of: Any) -> Wrong:
    truth = _truth()
    written: dict[str, Tensor] = {}
    for number, (parameters, optimizer) in enumerate(_ranks(*WRITTEN)):
        generator = torch.get_rng_state()
        state = state_of(parameters, optimizer, number, False)
        if not isinstance(state, Mapping):
            return "no-dictionary", f"returned {type(state).__name__}, and should return tensors by name"
        for name, held in state.items():
            if (found := _write(name, held, written, f"rank {number}'s {name}")) is not None:
                return found
        if f"random.{number}.cpu" not in state:
            return "missing", f"rank {number} does not write the state of its random generator, random.{number}.cpu"
        own = state[f"random.{number}.cpu"]
        if own.dtype != generator.dtype or not torch.equal(own, generator):
            return "random", f"random.{number}.cpu is not the state of torch's generator, which set_rng_state could get"
    if (found := _compare(written, truth)) is not None:
        return found
    for layout in READ:
        where = f"read by {layout[0]} stage{'s' * (layout[0] > 1)} of {layout[1]} slice{'s' * (layout[1] > 1)}"
        read: dict[str, Tensor] = {}
        for number, (parameters, optimizer) in enumerate(ranks := _ranks(*layout)):
            _forget(parameters, optimizer)
            for name, held in state_of(parameters, optimizer, number, False).items():
                if not name.startswith("random."):
                    _read(held, written[name] if name in written else torch.empty(0))
            for name, tensor in _held_by(ranks[number]):
                parameter = parameters[name.removeprefix(OPTIMIZER).rpartition(".")[0] if OPTIMIZER in name else name]
                own = _own(truth[name], parameter) if tensor.dim() else truth[name]
                if not torch.equal(tensor, own):
                    return "not-read", f"{where}: rank {number}'s {name} does not get what was written"
                read[name] = tensor
        if lost := [name for name in truth if name not in read]:
            return "not-read", f"{where}: no rank reads {lost[0]}"
    return None


def _compare(written: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> Wrong:
    for name, right in truth.items():
        if name not in written:
            others = sorted(other for other in written if other not in truth and not other.startswith("random."))
            instead = f"; instead there is {others[0]}" if others else ""
            return "missing", f"no rank writes {name}{instead}"
        own = written[name]
        if own.shape != right.shape:
            return "shape", f"{name} is written as {tuple(own.shape)}, and the whole is {tuple(right.shape)}"
        if own.isnan().any():
            return "missing", f"a part of {name} is not written by any rank"
        if not torch.equal(own, right):
            return "wrong-place", f"{name} is put together wrongly: a slice is in the place of another"
    return None


def _write(name: str, held: object, written: dict[str, Tensor], what: str) -> Wrong:
    """Put what a rank holds in its place; NaN is what no rank has written yet."""
    if not isinstance(held, Tensor):
        return "no-tensor", f"{what}: is {type(held).__name__}, and should be a tensor"
    whole, views = (held.whole, held.views) if isinstance(held, Slice) else (held.shape, {(0,) * held.dim(): held})
    place = written.setdefault(name, torch.full(tuple(whole), torch.nan, dtype=torch.float64))
    for offsets, view in views.items():
        if place.dim() != view.dim() or any(
            offset + size > length for offset, size, length in zip(offsets, view.shape, place.shape, strict=True)
        ):
            return "outside", f"{what}: a slice {tuple(view.shape)} at {tuple(offsets)} of {tuple(place.shape)}"
        there = place[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))]
        is_new = there.isnan()
        if not torch.equal(there[~is_new], view.double()[~is_new]):
            told = f"{what} is another tensor than what a rank before has written by this name"
            return "collision", f"{told}: a name must be that of the whole model, and a slice must have its place"
        there.copy_(view)
    return None


def _read(held: Any, whole: Tensor) -> None:
    """Overwrite what a rank holds by the same part of the whole, as far as there is one."""
    views = held.views if isinstance(held, Slice) else {(0,) * held.dim(): held}
    for offsets, view in views.items():
        part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=False))]
        if part.shape == view.shape:
            view.copy_(part)


def _whole(name: str) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(SHAPES[name]).numel()).view(SHAPES[name]) + 100 * list(SHAPES).index(name)


def _truth() -> dict[str, Tensor]:
    """What the checkpoint of one process holds: each moment is a multiple of its parameter."""
    found: dict[str, Tensor] = {}
    for number, name in enumerate(SHAPES):
        whole = _whole(name).double()
        found[name], found[f"{OPTIMIZER}{name}.step"] = whole, torch.tensor(3.0 + number, dtype=torch.float64)
        found[f"{OPTIMIZER}{name}.exp_avg"], found[f"{OPTIMIZER}{name}.exp_avg_sq"] = 2 * whole, 3 * whole
    return found


def _ranks(stages: int, slices: int) -> list[Rank]:
    """What each rank of a layout holds: its stage's parameters, or slices of them, and Adam's state of these."""
    ranks = []
    for stage in range(stages):
        names = [name for number, name in enumerate(SHAPES) if number * stages // len(SHAPES) == stage]
        for own in range(slices):
            parameters = {}
            for name in names:
                whole, dim = _whole(name), SPLIT.get(name)
                if dim is None or slices == 1:
                    parameters[name] = nn.Parameter(whole)
                else:
                    start, part = _slices(whole, dim, slices)[own]
                    parameters[name] = _sliced(part, dim, start, whole)
            optimizer = torch.optim.Adam(parameters.values())
            for name, parameter in parameters.items():
                step = torch.tensor(3.0 + list(SHAPES).index(name))
                moments = {"exp_avg": 2 * parameter.detach(), "exp_avg_sq": 3 * parameter.detach()}
                optimizer.state[parameter] = {"step": step, **moments}
            ranks.append((parameters, optimizer))
    return ranks


def _slices(whole: Tensor, dim: int, count: int) -> list[tuple[int, Tensor]]:
    parts = whole.tensor_split(count, dim)
    return [(sum(part.shape[dim] for part in parts[:number]), part) for number, part in enumerate(parts)]


def _sliced(part: Tensor, dim: int, start: int, whole: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(part.clone())
    place(parameter, Placement((DimSlice(dim, start, whole.shape[dim], ("tp",)),)))
    return parameter


def _own(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    for dim, start, *_ in placement_of(parameter).slices:
        whole = whole.narrow(dim, start, parameter.shape[dim])
    return whole


def _held_by(rank: Rank) -> list[tuple[str, Tensor]]:
    parameters, optimizer = rank
    moments = [
        (f"{OPTIMIZER}{name}.{key}", value.double())
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    ]
    return [*((name, parameter.detach().double()) for name, parameter in parameters.items()), *moments]


@torch.no_grad()
def _forget(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for parameter in parameters.values():
        parameter.zero_()
        for value in optimizer.state[parameter].values():
            value.zero_()
