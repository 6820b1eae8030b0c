"""The cost of a message between ranks that share cores, with gloo's usual threads and with patient ones, in turn.

python bench/messages.py
"""

import statistics
import time
from dataclasses import dataclass, field
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from ranks import join

from distlab.collectives.algorithms import shift
from distlab.comm.processes import leave
from distlab.run.progress import each


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
    port: int = 29557
    """where rank 0 listens"""


def measure(rank: int, world_size: int, patient: bool, settings: Settings, results: "SimpleQueue[float]") -> None:
    """One rank: messages round the ring, each rank to the next one; rank 0 puts the seconds of one into `results`."""
    join(rank, world_size, settings.port, patient)
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


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
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
