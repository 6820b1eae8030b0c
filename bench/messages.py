"""The cost of a message between ranks that share cores, with gloo's usual threads and with patient ones, in turn.

python bench/messages.py
python bench/messages.py --shared    activations between two stages: over gloo, and through shared memory
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from ranks import join
from torch import Tensor
from turns import quartiles_of_ratios, seconds_in_turn

from distlab.collectives.algorithms import shift
from distlab.comm.context import context_of
from distlab.comm.group import open_queues
from distlab.machine.processes import leave
from distlab.run.progress import each

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


def measure(rank: int, world_size: int, patient: bool, settings: Settings, results: "SimpleQueue[float]") -> None:
    """One rank: messages round the ring, each rank to the next one; rank 0 puts the seconds of one into `results`."""
    join(rank, world_size, settings.port, patient, backend="gloo")
    for kilobytes in settings.kilobytes:
        data, received = torch.ones(kilobytes * 250), torch.ones(kilobytes * 250)
        for _ in range(10):
            shift(data, received)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(settings.in_a_row):
            shift(data, received)
        dist.barrier()
        if rank == 0:
            results.put((time.perf_counter() - started) / settings.in_a_row)
    leave(0)


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


def compare_memory(rank: int, crowd: int, settings: Settings) -> None:
    """One of two ranks: messages over gloo and through shared memory, in turn; rank 0 prints lines of the table.

    Or one of the crowd, which computes until the others have ended.
    """
    join(rank, 2 + crowd, settings.port)
    weight = torch.randn(400, 400)

    def compute() -> object:
        return torch.mm(weight, weight)

    end = dist.barrier(async_op=True) if rank > 1 else None
    while end is not None and not end.is_completed():
        compute()
    for kilobytes in settings.kilobytes if rank < 2 else ():
        data = torch.ones(kilobytes * 250)
        turns = {name: exchange(data, compute, name == "shared") for name in ("gloo", "shared")}
        seconds = seconds_in_turn({"none": lambda _: compute(), **turns}, lambda _: None, settings.in_a_row)
        alone = statistics.median(seconds["none"])
        medians = [1e3 * (statistics.median(seconds[name]) - alone) for name in turns]
        low, ratio, high = quartiles_of_ratios(seconds["gloo"], seconds["shared"])
        if rank == 0:
            cells = " | ".join(f"{milliseconds:.2f}" for milliseconds in medians)
            print(f"| {crowd} | {kilobytes} kB | {cells} | {ratio:.2f} ({low:.2f} to {high:.2f}) |", flush=True)
    if rank < 2:
        dist.barrier()
    leave(0)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.starts < 1:
        raise SystemExit(f"--starts {settings.starts}: give at least 1")
    if settings.shared:
        ratio = "gloo ÷ shared: median (quartiles)"
        print(f"| other ranks | message | over gloo, ms | through shared memory, ms | {ratio} |")
        print("|---|---|---|---|---|", flush=True)
        for crowd in settings.crowds:
            mp.spawn(compare_memory, args=(crowd, settings), nprocs=2 + crowd)
        return
    print("| ranks | message | usual threads, µs | patient ones | times as fast (median) | range |")
    print("|---|---|---|---|---|---|", flush=True)
    for world_size in settings.worlds:
        seconds: dict[bool, list[list[float]]] = {False: [], True: []}
        for start in each(range(settings.starts), f"starts of {world_size} ranks"):
            for patient in (False, True) if start % 2 else (True, False):
                results: SimpleQueue[float] = mp.get_context("spawn").SimpleQueue()
                mp.spawn(measure, args=(world_size, patient, settings, results), nprocs=world_size)
                seconds[patient].append([results.get() for _ in settings.kilobytes])
        for kilobytes, usual, patient_ones in zip(
            settings.kilobytes, zip(*seconds[False], strict=True), zip(*seconds[True], strict=True), strict=True
        ):
            ratios = [a / b for a, b in zip(usual, patient_ones, strict=True)]
            print(
                f"| {world_size} | {kilobytes} kB | {1e6 * statistics.median(usual):.0f} "
                f"| {1e6 * statistics.median(patient_ones):.0f} | {statistics.median(ratios):.1f} "
                f"| {min(ratios):.1f} to {max(ratios):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
