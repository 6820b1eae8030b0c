"""Tries handwritten collectives in a simulated world, in which every send waits for its receiver."""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.collectives.simulation import Deadlock, HalfMessage, Link, SimulatedEndpoint, SimulatedWorld
from distlab_compare.mistakes import fit
from distlab_exercises.loading import Solution
from distlab_exercises.verdict import Wrong, expect, where

SIZES = [2, 3, 4, 5, 8]
ELEMENTS, ODD = 840, 13  # the first divide among each of `SIZES`
REDUCTIONS = "reduce", "allreduce", "reducescatter"


def try_collective(solution: Solution) -> list[str]:
    """Compare a collective of a student's file with the right results, and with the costs of the library's own."""
    name, own = solution.name, solution.function
    library = getattr(importlib.import_module(solution.library), name)
    for size in SIZES:
        has_root = {"src", "dst"} & set(inspect.signature(library).parameters)
        roots = [0, size // 2, size - 1] if has_root else [None]
        trials = [(ELEMENTS, root, ReduceOp.SUM) for root in roots] + [(ODD, roots[-1], ReduceOp.SUM)]
        if name.partition("_")[0] in REDUCTIONS:
            trials.append((ELEMENTS, roots[-1], ReduceOp.MAX))
        for elements, root, op in trials:
            with where(f"{size} ranks{f', root {root}' if root is not None else ''}{', MAX' * (op == ReduceOp.MAX)}"):
                _try_size(own, library, size, root, elements, op)
    return ["right on every rank, with no more messages and bytes than needed"]


def simulate(world: SimulatedWorld, work: Callable[[SimulatedEndpoint], Any]) -> list[Any]:
    """Return each rank's result of `work`; `Wrong` if the ranks do not finish."""
    try:
        return world.run(work)
    except (Deadlock, HalfMessage) as error:
        raise Wrong("deadlock" if isinstance(error, Deadlock) else "half-message", str(error)) from error


def _try_size(
    own: Callable[..., None], library: Callable[..., None], size: int, root: int | None, elements: int, op: Any
) -> None:
    kind = library.__name__.partition("_")[0]
    inputs = [torch.randn(elements, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    if kind == "reducescatter":
        inputs = [torch.stack([x * (block + 1) for block in range(size)]) for x in inputs]
    link = Link(latency_seconds=0.05, bytes_per_second=inputs[0].nbytes)
    world, best, given = SimulatedWorld(size, link), SimulatedWorld(size, link), [x.clone() for x in inputs]
    results = simulate(world, partial(_call, own, kind, given, root, op))
    right = best.run(partial(_call, library, kind, [x.clone() for x in inputs], root, op))
    for rank in (rank for rank in range(size) if right[rank] is not None):
        name_difference(kind, rank, results[rank], right[rank], inputs, root, op)
    for rank, (tensor, before) in enumerate(zip(given, inputs, strict=True)):
        told = f"rank {rank} no longer has its own `tensor`, which must not be changed"
        expect(kind != "reducescatter" or torch.equal(tensor, before), "changed", told)
    messages, needed = (max(count.sends + count.receives for count in each.counts) for each in (world, best))
    slow = f"right, but it takes {world.makespan / best.makespan:.1f} times as long as this topology needs"
    told = f"{slow}: the busiest rank has {messages} messages, and needs {needed}"
    expect(world.makespan <= 1.1 * best.makespan, "slow", told)


def _call(
    collective: Callable[..., None],
    kind: str,
    given: list[Tensor],
    root: int | None,
    op: Any,
    endpoint: SimulatedEndpoint,
) -> Any:
    """Run one rank's part, with its tensor of `given`; return its result."""
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


def name_difference(
    kind: str, rank: int, result: Tensor, right: Tensor, inputs: list[Tensor], root: int | None, op: Any
) -> None:
    """Raise `Wrong`, which describes a rank's wrong result in terms of the ranks' `inputs`."""
    if torch.allclose(result, right, rtol=1e-4, atol=1e-4):
        return
    own = f"rank {rank}"
    if kind in ("reducescatter", "alltoall"):
        inputs = [x[rank] for x in inputs]
    if kind in ("gather", "allgather", "alltoall"):
        row = next(r for r in range(len(inputs)) if not torch.allclose(result[r], right[r], rtol=1e-4, atol=1e-4))
        what = f"rank {row}'s {'segment' if kind == 'alltoall' else 'tensor'}"
        raise Wrong("wrong-row", f"{own}: row {row}, where {what} should be, {whose(result[row], inputs)}")
    told = f"{own} {whose(result, inputs)}"
    changed = f"{own}, which is not the root, no longer has its own tensor: it {whose(result, inputs)}"
    expect(kind != "reduce" or rank == root, "changed", changed)
    expect(kind != "broadcast", "wrong-tensor", f"{told}, and should have rank {root}'s")
    ignored = f"{told}, and should have the maximum of all: `op` says how to combine"
    expect(op != ReduceOp.MAX, "ignores-op", ignored)
    raise Wrong("wrong-sum", f"{told}, and should have the sum of all")


def whose(result: Tensor, inputs: list[Tensor], what: str = "tensor") -> str:
    """Describe a rank's result in terms of the ranks' tensors, of which it may be a sum."""
    if not result.any():
        return "has only zeros"
    found = fit(result, inputs) if result.shape == inputs[0].shape and result.numel() > len(inputs) else None
    if found is None:
        return f"has something else than a sum of the ranks' {what}s"
    counts = [round(x) for x in found]
    if sum(counts) == max(counts) == 1:
        return f"has rank {counts.index(1)}'s {what}"
    parts = [f"rank {rank}'s {'' if n == 1 else f'{n} times'}".strip() for rank, n in enumerate(counts) if n]
    lost = [str(rank) for rank, n in enumerate(counts) if not n]
    lacks = f", without rank {' and '.join(lost)}'s" if lost else ""
    return f"has the sum of {', '.join(parts)}{lacks}"
