"""Tries handwritten collectives in a simulated world, in which every send waits for its receiver."""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.collectives.simulation import Deadlock, HalfMessage, Link, SimulatedEndpoint, SimulatedWorld
from distlab_exercises.loading import load
from distlab_exercises.shares import fit
from distlab_exercises.verdict import Verdict, Wrong

SIZES = [2, 3, 4, 5, 8]
ELEMENTS, ODD = 840, 13  # the first divide among each of `SIZES`
REDUCTIONS = "reduce", "allreduce", "reducescatter"


def try_collective(script: Path, module: str, name: str) -> Verdict:
    """Compare a collective of a student's file with what its ranks should have, and with the library's own costs."""
    own, library = getattr(load(script), name), getattr(importlib.import_module(module), name)
    verdict = Verdict(f"{name}: 2 to 8 ranks")
    for size in SIZES:
        has_root = {"src", "dst"} & set(inspect.signature(library).parameters)
        roots = [0, size // 2, size - 1] if has_root else [None]
        trials = [(ELEMENTS, root, ReduceOp.SUM) for root in roots] + [(ODD, roots[-1], ReduceOp.SUM)]
        if name.partition("_")[0] in REDUCTIONS:
            trials.append((ELEMENTS, roots[-1], ReduceOp.MAX))
        for elements, root, op in trials:
            found = _try_size(own, library, name, size, root, elements, op)
            if found is not None:
                where = f"{size} ranks{f', root {root}' if root is not None else ''}{', MAX' * (op == ReduceOp.MAX)}"
                return verdict.fails(found[0], [f"{where}: {found[1]}"])
    return verdict.passes("right on every rank, with no more messages and bytes than needed")


def simulate(world: SimulatedWorld, work: Callable[[SimulatedEndpoint], Any]) -> tuple[list[Any], Wrong]:
    """What `work` returns on each rank; or why the ranks did not come to an end."""
    try:
        return world.run(work), None
    except (Deadlock, HalfMessage) as error:
        return [], ("deadlock" if isinstance(error, Deadlock) else "half-message", str(error))


def _try_size(
    own: Callable[..., None],
    library: Callable[..., None],
    name: str,
    size: int,
    root: int | None,
    elements: int,
    op: Any,
) -> Wrong:
    kind = name.partition("_")[0]
    inputs = [torch.randn(elements, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    if kind == "reducescatter":
        inputs = [torch.stack([x * (block + 1) for block in range(size)]) for x in inputs]
    link = Link(latency_seconds=0.05, bytes_per_second=inputs[0].nbytes)
    world, given = SimulatedWorld(size, link), [x.clone() for x in inputs]
    results, wrong = simulate(world, partial(_call, own, kind, given, root, op))
    if wrong is not None:
        return wrong
    best = SimulatedWorld(size, link)
    for rank, (result, right) in enumerate(
        zip(results, best.run(partial(_call, library, kind, [x.clone() for x in inputs], root, op)), strict=True)
    ):
        if result is not None and not torch.allclose(result, right, rtol=1e-4, atol=1e-4):
            return _name(kind, rank, result, right, inputs, root, op)
    if kind == "reducescatter":
        for rank, (tensor, before) in enumerate(zip(given, inputs, strict=True)):
            if not torch.equal(tensor, before):
                return "changed", f"rank {rank} no longer has its own `tensor`, which must not be changed"
    if world.makespan > 1.1 * best.makespan:
        messages = max(count.sends + count.receives for count in world.counts)
        needed = max(count.sends + count.receives for count in best.counts)
        slow = f"right, but it takes {world.makespan / best.makespan:.1f} times as long as this topology needs"
        return "slow", f"{slow}: the busiest rank has {messages} messages, and needs {needed}"
    return None


def _call(
    collective: Callable[..., None],
    kind: str,
    given: list[Tensor],
    root: int | None,
    op: Any,
    endpoint: SimulatedEndpoint,
) -> Any:
    """One rank's part, with its tensor of `given`; returns what it has then."""
    rank, tensor = endpoint.get_rank(), given[endpoint.get_rank()]
    gathered, is_root = torch.zeros(endpoint.get_world_size(), *tensor.shape), rank == root
    result, arguments = {
        "broadcast": (tensor, (tensor, root)),
        "reduce": (tensor, (tensor, root, op)),
        "allreduce": (tensor, (tensor, op)),
        "reducescatter": ((scattered := torch.zeros_like(tensor[0])), (tensor, scattered, op)),
        "gather": (gathered if is_root else None, (tensor, gathered if is_root else None, root)),
        "allgather": (gathered, (tensor, gathered)),
    }[kind]
    collective(*arguments, endpoint=endpoint)
    return result


def _name(
    kind: str, rank: int, result: Tensor, right: Tensor, inputs: list[Tensor], root: int | None, op: Any
) -> tuple[str, str]:
    """What a rank has instead of the right result."""
    own = f"rank {rank}"
    if kind == "reducescatter":
        inputs = [x[rank] for x in inputs]
    if kind in ("gather", "allgather"):
        row = next(r for r in range(len(inputs)) if not torch.allclose(result[r], right[r], rtol=1e-4, atol=1e-4))
        return "wrong-row", f"{own}: row {row}, where rank {row}'s tensor should be, {_whose(result[row], inputs)}"
    if kind == "reduce" and rank != root:
        return "changed", f"{own}, which is not the root, no longer has its own tensor: it {_whose(result, inputs)}"
    told = _whose(result, inputs)
    if kind == "broadcast":
        return "wrong-tensor", f"{own} {told}, and should have rank {root}'s"
    if op == ReduceOp.MAX:
        return "ignores-op", f"{own} {told}, and should have the maximum of all: `op` says how to combine"
    return "wrong-sum", f"{own} {told}, and should have the sum of all"


def _whose(result: Tensor, inputs: list[Tensor]) -> str:
    """A result in terms of the ranks' tensors, of which it may be a sum."""
    if not result.any():
        return "has only zeros"
    found = fit(result, inputs) if result.shape == inputs[0].shape and result.numel() > len(inputs) else None
    if found is None:
        return "has something else than a sum of the ranks' tensors"
    counts = [round(x) for x in found]
    if sum(counts) == max(counts) == 1:
        return f"has rank {counts.index(1)}'s tensor"
    parts = [f"rank {rank}'s {'' if n == 1 else f'{n} times'}".strip() for rank, n in enumerate(counts) if n]
    lost = [str(rank) for rank, n in enumerate(counts) if not n]
    lacks = f", without rank {' and '.join(lost)}'s" if lost else ""
    return f"has the sum of {', '.join(parts)}{lacks}"
