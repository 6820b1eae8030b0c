"""The cost of a message between ranks that share cores, with gloo's usual threads and with patient ones, in turn.

python bench/messages.py
python bench/messages.py --shared    activations between two stages: over gloo, and through shared memory
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from tables import print_head, print_row, range_of
from torch import Tensor
from turns import quartiles_of_ratios, results_in_turn, seconds_in_turn

from distlab.collectives.algorithms import shift
from distlab.comm.context import context_of
from distlab.comm.group import open_queues
from simplellm import command_line
from simplellm.errors import require

SLOTS = 4  # messages that have not been taken yet


@dataclass
class Settings:
    """What to measure."""

    worlds: list[int] = field(default_factory=lambda: [2, 4])
    """numbers of ranks"""
    kilobytes: list[int] = field(default_factory=lambda: [1, 100, 1000])
    """sizes of the messages"""
    in_a_row: int = 300
    """messages of each rank, in each start"""
    starts: int = 5
    """how often the ranks are started, with threads of either kind"""
    shared: bool = False
    """compare messages over gloo with messages through shared memory, between two ranks that compute meanwhile"""
    crowds: list[int] = field(default_factory=lambda: [0, 2])
    """with --shared: numbers of further ranks, which compute all the time"""
    port: int = 29557
    """where rank 0 listens"""


def measure(settings: Settings) -> list[float]:
    """One rank: messages round the ring, each rank to the next one; the seconds of one of each size."""
    found = []
    for kilobytes in settings.kilobytes:
        data, received = torch.ones(kilobytes * 250), torch.ones(kilobytes * 250)
        for _ in range(10):
            shift(data, received)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(settings.in_a_row):
            shift(data, received)
        dist.barrier()
        found.append((time.perf_counter() - started) / settings.in_a_row)
    return found


def compare_threads(settings: Settings) -> None:
    print_head("ranks", "message", "usual threads, µs", "patient ones", "times as fast (median)", "range")
    for world_size in settings.worlds:
        start = partial(run_ranks, measure, world_size, settings.port, backend="gloo")
        starts = {patient: partial(start, patient=patient) for patient in (False, True)}
        seconds = results_in_turn(starts, lambda _: settings, settings.starts, 0, f"starts of {world_size} ranks")
        of_sizes = (zip(*seconds[patient], strict=True) for patient in (False, True))
        for kilobytes, usual, patient_ones in zip(settings.kilobytes, *of_sizes, strict=True):
            ratios = [a / b for a, b in zip(usual, patient_ones, strict=True)]
            microseconds = (f"{1e6 * statistics.median(of_kind):.0f}" for of_kind in (usual, patient_ones))
            times_as_fast = f"{statistics.median(ratios):.1f}", range_of(ratios, 1)
            print_row(world_size, f"{kilobytes} kB", *microseconds, *times_as_fast)


def exchange(data: Tensor, compute: Callable[[], object], is_shared: bool) -> Callable[[object], None]:
    """A turn of a stage: compute, send the result, take what the other rank has sent, for which a receive is posted."""
    other = 1 - dist.get_rank()
    group = dist.new_group([0, 1], use_local_synchronization=True)  # receives that are not used stay behind in it
    if is_shared:
        for row in ((0, 1), (1, 0)):
            open_queues(row, data.nbytes, data, group, slots=SLOTS)
        assert context_of().shares_memory

    def post() -> Any:
        return dist.irecv(torch.empty_like(data), other, group)

    posted = deque([post(), post()])

    def turn(_: object) -> None:
        compute()
        sent: Any = dist.isend(data, other, group)
        posted.append(post())
        posted.popleft().wait()
        sent.wait()

    return turn


def compare_memory(crowd: int, settings: Settings) -> None:
    """One of two ranks: messages over gloo and through shared memory, in turn; rank 0 prints lines of the table.

    Or one of the crowd, which computes until the others have ended.
    """
    rank, weight = dist.get_rank(), torch.randn(400, 400)

    def compute() -> object:
        return torch.mm(weight, weight)

    if rank > 1:
        end = dist.barrier(async_op=True)
        while not end.is_completed():
            compute()
        return
    for kilobytes in settings.kilobytes:
        data = torch.ones(kilobytes * 250)
        turns = {name: exchange(data, compute, name == "shared") for name in ("gloo", "shared")}
        seconds = seconds_in_turn({"none": lambda _: compute(), **turns}, lambda _: None, settings.in_a_row)
        alone = statistics.median(seconds["none"])
        medians = (f"{1e3 * (statistics.median(seconds[name]) - alone):.2f}" for name in turns)
        if rank == 0:
            print_row(crowd, f"{kilobytes} kB", *medians, quartiles_of_ratios(seconds["gloo"], seconds["shared"]))
    dist.barrier()


def main(settings: Settings) -> None:
    require(settings.starts > 0, f"--starts {settings.starts}: give at least 1")
    if not settings.shared:
        compare_threads(settings)
        return
    ratio = "gloo ÷ shared: median (quartiles)"
    print_head("other ranks", "message", "over gloo, ms", "through shared memory, ms", ratio)
    for crowd in settings.crowds:
        run_ranks(compare_memory, 2 + crowd, settings.port, crowd, settings)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
