"""Predicts the cost of a collective by running it in a simulated world.

The model is from Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
2005: a message costs a latency plus a time per byte, and combining two tensors costs a time per byte. This module adds
two things: ranks on one computer share its bandwidth and its cores, and copying a tensor also costs a time per byte.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from distlab import collectives as by_hand
from distlab.collectives.simulation import SimulatedEndpoint, SimulatedWorld
from distlab.comm.endpoint import Endpoint
from distlab.comm.link import Link
from distlab_planner.model import NUMBER_BYTES

TimedWork = Callable[[], object]
LIBRARY = "library"


@dataclass(frozen=True)
class CostModel:
    """The model's numbers for a computer."""

    link: Link  # cost of a message if it is the only one
    shared_bytes_per_second: float  # of all messages together, if every rank sends at once
    combined_bytes_per_second: float  # adding one tensor to another, on one rank only
    copied_bytes_per_second: float = math.inf  # copying one tensor to another, on one rank only
    ranks_at_once: float = math.inf  # ranks that can add at that speed at the same time; more ranks share it
    one_card: bool = False  # simultaneous messages of a rank share its link, as on a network

    def __str__(self) -> str:
        rates = self.shared_bytes_per_second, self.combined_bytes_per_second, self.copied_bytes_per_second
        alone, together, combined, copied = (f"{rate / 1e9:.1f} GB/s" for rate in (self.link.bytes_per_second, *rates))
        at_once = "" if math.isinf(self.ranks_at_once) else f" on {self.ranks_at_once:.1f} ranks at once"
        computing = f"adding at {combined}{at_once}, copying at {copied}"
        if math.isinf(self.link.bytes_per_second):
            return computing
        return f"{self.link.latency_seconds * 1e6:.0f} µs each, {alone} alone, {together} all together; {computing}"


def whole_numbers(size_bytes: int, world_size: int) -> int:
    """Round `size_bytes` up so that each rank has the same number of elements, at least one."""
    share = NUMBER_BYTES * world_size
    return max(1, math.ceil(size_bytes / share)) * share


def operations(
    size_bytes: int, endpoint: Endpoint = dist, device: str = "cpu", group: dist.ProcessGroup | None = None
) -> dict[str, dict[str, TimedWork]]:
    """Return a rank's collectives by operation and topology, with root 0; the library's own use `group`, of all ranks.

    `size_bytes`, rounded up by `whole_numbers`, is the size of the tensor that is broadcast or combined, or of all
    parts together that are gathered or scattered. On the device "meta", tensors have no content.
    """
    rank, size = endpoint.get_rank(), endpoint.get_world_size()
    whole = torch.ones(size, whole_numbers(size_bytes, size) // (NUMBER_BYTES * size), device=device)
    part, parts, other = whole[0].clone(), list(whole), torch.empty_like(whole)
    at_root = (whole, parts) if rank == 0 else (None, None)
    table: list[tuple[str, str, tuple[Any, ...], TimedWork]] = [
        ("broadcast", "naive tree ring", (whole, 0), lambda: dist.broadcast(whole, 0, group)),
        ("reduce", "naive tree", (whole, 0), lambda: dist.reduce(whole, 0, group=group)),
        ("all-reduce", "naive tree butterfly ring", (whole,), lambda: dist.all_reduce(whole, group=group)),
        ("gather", "naive tree", (part, at_root[0], 0), lambda: dist.gather(part, at_root[1], 0, group)),
        ("all-gather", "naive tree ring", (part, whole), lambda: dist.all_gather(parts, part, group)),
        ("reduce-scatter", "naive ring", (whole, part), lambda: dist.reduce_scatter(part, parts, group=group)),
        ("all-to-all", "naive pairwise", (parts, [*other]), lambda: dist.all_to_all_single(other, whole, group=group)),
    ]
    works: dict[str, dict[str, TimedWork]] = {}
    for operation, topologies, arguments, library in table:
        functions = {name: getattr(by_hand, f"{operation.replace('-', '')}_{name}") for name in topologies.split()}
        works[operation] = {name: partial(call, *arguments, endpoint=endpoint) for name, call in functions.items()}
        works[operation][LIBRARY] = library
    return works


def predict_collective(
    operation: str,
    topology: str,
    size_bytes: int,
    world_size: int,
    costs: CostModel,
    in_a_row: int = 1,
    keep_messages: bool = False,
) -> SimulatedWorld:
    """Run an operation `in_a_row` times in a simulated world, and return it; its `makespan` is the prediction."""

    def work(endpoint: SimulatedEndpoint) -> TimedWork:
        return operations(size_bytes, endpoint, device="meta")[operation][topology]

    return simulate_collective(work, world_size, costs, in_a_row, keep_messages)


def simulate_collective(
    work: Callable[[SimulatedEndpoint], TimedWork],
    world_size: int,
    costs: CostModel,
    in_a_row: int = 1,
    keep_messages: bool = False,
) -> SimulatedWorld:
    """Run each rank's result of `work` `in_a_row` times in a simulated world, and return it; tensors are on "meta"."""
    sharing = costs.shared_bytes_per_second, costs.ranks_at_once, costs.one_card
    world = SimulatedWorld(world_size, costs.link, {}, *sharing, keep_messages)

    def run_and_charge(endpoint: SimulatedEndpoint) -> None:
        run = work(endpoint)
        with _Computing(endpoint, costs):
            for _ in range(in_a_row):
                run()

    world.run(run_and_charge)
    return world


class _Computing(TorchDispatchMode):
    """Adds the time of tensor additions and copies to the clock of a simulated rank."""

    def __init__(self, endpoint: SimulatedEndpoint, costs: CostModel) -> None:
        super().__init__()
        self._endpoint = endpoint
        copies = torch.ops.aten.copy_.default, torch.ops.aten.clone.default
        self._bytes_per_second = dict.fromkeys(copies, costs.copied_bytes_per_second)
        self._bytes_per_second[torch.ops.aten.add.out] = costs.combined_bytes_per_second

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._bytes_per_second:
            self._endpoint.compute(result.nbytes / self._bytes_per_second[func])
        return result


def bytes_of_a_message(operation: str, topology: str, size_bytes: int, world_size: int) -> int:
    """Return the average size of the busiest rank's messages; 0 with a world size of 1."""
    counts = predict_collective(
        operation, topology, size_bytes, world_size, CostModel(Link(), math.inf, math.inf)
    ).counts
    busiest = max(counts, key=lambda rank: rank.sent_bytes + rank.received_bytes)
    return (busiest.sent_bytes + busiest.received_bytes) // max(1, busiest.sends + busiest.receives)
