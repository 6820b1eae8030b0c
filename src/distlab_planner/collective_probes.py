"""Measures how fast this computer sends, adds and copies: the numbers of `collective_model`."""

import itertools
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.collectives.algorithms import shift
from distlab.comm.endpoint import Endpoint
from distlab.comm.link import Link
from distlab_planner.collective_model import CostModel, TimedWork
from distlab_planner.model import NUMBER_BYTES

FITTED_BYTES = 1_000_000, 4_000_000, 16_000_000
ADDED_BYTES = 100_000_000  # takes long enough that all ranks add at once, although they leave the barrier one by one


def fit_costs(rounds: int = 10) -> dict[int, CostModel]:
    """Measure the model's numbers on all ranks together; the result is by the size of the messages used."""
    fitted = {}
    for message_bytes in FITTED_BYTES:
        probes = Probes(message_bytes, max(FITTED_BYTES))
        fitted[message_bytes] = probes.costs(seconds_in_turn(probes.works(), rounds), dist.get_world_size())
    return fitted


def costs_for(message_bytes: int, fitted: Mapping[int, CostModel]) -> CostModel:
    """Return the costs that were measured with messages of the most similar size."""
    return fitted[min(fitted, key=lambda fitted_bytes: abs(math.log(fitted_bytes / max(1, message_bytes))))]


@dataclass(frozen=True)
class Probes:
    """The work that all ranks run to measure the model's numbers."""

    message_bytes: int  # size of the large messages, and of the tensors that are added and copied
    tensor_bytes: int  # size of the tensor that these are parts of; one that fits in the caches is faster

    @property
    def messages(self) -> int:
        return max(1, self.tensor_bytes // self.message_bytes)

    @property
    def additions(self) -> int:
        return max(1, ADDED_BYTES // self.message_bytes)

    def works(self, endpoint: Endpoint = dist, device: str = "cpu") -> dict[str, TimedWork]:
        """Return the work of this rank, by name; with a world size of 1 there is nothing to send.

        "tiny" and "alone" are ping-pongs of one number and of a large message between ranks 0 and 1. In "together",
        every rank sends its tensor to the next rank, message by message. "adding" and "copying" run only on rank 0,
        "all_adding" on all ranks. Successive messages are successive parts of the tensor; a ping-pong repeats the same
        message, as a rank of a naive topology sends the same tensor again. On the device "meta", tensors have no
        content.
        """
        rank, size = endpoint.get_rank(), endpoint.get_world_size()
        tiny = torch.ones(1, device=device)
        shape = self.messages, self.message_bytes // NUMBER_BYTES
        parts, others = (list(torch.ones(shape, device=device)) for _ in range(2))
        pairs = list(zip(parts, others, strict=True))

        def ping_pong(tensor: Tensor) -> None:
            for sender in (0, 1):
                if rank < 2:
                    (endpoint.send if rank == sender else endpoint.recv)(tensor, 1 - rank)

        def shift_all() -> None:
            for part, received in pairs:
                shift(part, received, endpoint)

        def add() -> None:
            for part, other in itertools.islice(itertools.cycle(pairs), self.additions):
                torch.add(part, other, out=part)

        def copy() -> None:
            for part, other in pairs:
                part.copy_(other)

        computing: dict[str, TimedWork] = {"adding": add, "copying": copy}
        if rank > 0:
            computing = dict.fromkeys(computing, lambda: None)
        if size == 1:
            return computing
        ping_pongs: dict[str, TimedWork] = {"tiny": partial(ping_pong, tiny), "alone": partial(ping_pong, parts[0])}
        return {**ping_pongs, "together": shift_all, "all_adding": add, **computing}

    def costs(self, seconds: Mapping[str, list[float]], world_size: int) -> CostModel:
        """Return the model's numbers from the medians of each work's `seconds`, run by `world_size` ranks."""
        typical = {name: statistics.median(of_rounds) for name, of_rounds in seconds.items()}
        combined = self.additions * self.message_bytes / typical["adding"]
        copied = self.messages * self.message_bytes / typical["copying"]
        if world_size == 1:
            return CostModel(Link(), math.inf, combined, copied)
        alone = typical["alone"] / 2
        latency = min(typical["tiny"], alone) / 2  # on a busy computer, either measurement may be too high
        link = Link(latency, self.message_bytes / (alone - latency))
        moved = self.messages * world_size * (self.message_bytes + latency * link.bytes_per_second)
        ranks_at_once = max(1, world_size * typical["adding"] / typical["all_adding"])
        return CostModel(link, moved / typical["together"], combined, copied, ranks_at_once)


def measure(work: TimedWork, rounds: int) -> float:
    """Measure the seconds until the slowest rank has finished; return the median of `rounds` rounds."""
    [seconds] = seconds_in_turn({"work": work}, rounds).values()
    return statistics.median(seconds)


def seconds_in_turn(works: Mapping[str, TimedWork], rounds: int, in_a_row: int = 1) -> dict[str, list[float]]:
    """Return the slowest rank's seconds after a barrier, for each work in each round; the first round is ignored.

    In each round all works run one after another, in alternating order, so that other load and changes of the
    computer's speed affect all of them equally. Each work runs `in_a_row` times per round, and the seconds are for one
    run: ranks that share cores leave the barrier one by one, and only the first run has to wait for the last rank.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(1 + rounds):
        for name in list(works)[:: -1 if turn % 2 else 1]:
            dist.barrier()
            started = time.perf_counter()
            for _ in range(in_a_row):
                works[name]()
            slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[name].append(slowest.item() / in_a_row)
    return {name: of_one[1:] for name, of_one in seconds.items()}
