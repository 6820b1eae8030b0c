"""The cost of a message between ranks that share cores, with gloo's usual threads and with patient ones, in turn.

python bench/messages.py
python bench/messages.py --shared    activations between two stages: over gloo, and through shared memory
"""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from ranks import join
from torch import Tensor
from turns import quartiles_of_ratios, seconds_in_turn

from distlab.collectives.algorithms import shift
from distlab.comm.processes import leave
from distlab.comm.shared import SharedMemory
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
    shared: bool = False
    """compare messages over gloo with messages through shared memory, between two ranks that compute meanwhile"""
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


class OverGloo:
    """Messages to the other one of two ranks, and from it."""

    def __init__(self, elements: int, tag: int) -> None:
        self.peer, self.elements, self.tag = 1 - dist.get_rank(), elements, tag

    def post(self) -> tuple[Tensor, dist.Work]:
        """A receive, and where its tensor (elements,) will be."""
        received = torch.empty(self.elements)
        return received, self._work(dist.irecv(received, self.peer, tag=self.tag))

    def send(self, tensor: Tensor) -> dist.Work:
        return self._work(dist.isend(tensor, self.peer, tag=self.tag))

    def take(self, received: Tensor, work: dist.Work) -> Tensor:
        """The tensor of a message, when it has come."""
        work.wait()
        return received

    @staticmethod
    def _work(work: dist.Work | None) -> dist.Work:
        assert work is not None
        return work


class ThroughMemory(OverGloo):
    """The same with the data in memory that both ranks share, and a message of one byte that says that it is there."""

    SLOTS = 4  # messages that have not been taken yet

    def __init__(self, elements: int, tag: int) -> None:
        super().__init__(1, tag)
        world = dist.group.WORLD
        assert world is not None
        memory = SharedMemory(world)
        own = memory.allocate(self.SLOTS * elements, torch.float32, timedelta(seconds=60))
        parts = memory.parts_like(own)
        assert parts is not None
        self.sent, self.received = (
            itertools.cycle(parts[rank].view(self.SLOTS, elements)) for rank in (1 - self.peer, self.peer)
        )
        self.said = torch.zeros(1)

    def send(self, tensor: Tensor) -> dist.Work:
        next(self.sent).copy_(tensor)
        return super().send(self.said)

    def take(self, received: Tensor, work: dist.Work) -> Tensor:
        super().take(received, work)
        return next(self.received).clone()


class Word(OverGloo):
    """A message of one number only."""

    def __init__(self, elements: int, tag: int) -> None:
        super().__init__(1, tag)
        self.said = torch.zeros(1)

    def send(self, tensor: Tensor) -> dist.Work:
        return super().send(self.said)


def exchange(way: OverGloo, data: Tensor, compute: Callable[[], object]) -> Callable[[object], None]:
    """A turn of a stage: compute, send the result, take what the other rank has sent."""
    posted = deque([way.post(), way.post()])

    def turn(_: object) -> None:
        compute()
        sent = way.send(data)
        posted.append(way.post())
        way.take(*posted.popleft())
        sent.wait()

    return turn


def compare_memory(rank: int, settings: Settings) -> None:
    """One of two ranks: messages over gloo and through shared memory, in turn; rank 0 prints the table."""
    join(rank, 2, settings.port)
    weight = torch.randn(400, 400)

    def compute() -> object:
        return torch.mm(weight, weight)

    if rank == 0:
        print("| message | over gloo, ms | through shared memory, ms | 4 B, ms | gloo ÷ shared (quartiles) |")
        print("|---|---|---|---|---|", flush=True)
    tags = itertools.count(1)  # receives that are posted and not used stay behind
    for kilobytes in settings.kilobytes:
        data = torch.ones(kilobytes * 250)
        ways = [kind(data.numel(), next(tags)) for kind in (OverGloo, ThroughMemory, Word)]
        turns = {type(way).__name__: exchange(way, data, compute) for way in ways}
        seconds = seconds_in_turn({"none": lambda _: compute(), **turns}, lambda _: None, settings.in_a_row)
        alone = statistics.median(seconds["none"])
        medians = [1e3 * (statistics.median(seconds[name]) - alone) for name in turns]
        low, ratio, high = quartiles_of_ratios(seconds["OverGloo"], seconds["ThroughMemory"])
        if rank == 0:
            cells = " | ".join(f"{milliseconds:.2f}" for milliseconds in medians)
            print(f"| {kilobytes} kB | {cells} | {ratio:.2f} ({low:.2f} to {high:.2f}) |", flush=True)
    dist.barrier()
    leave(0)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.shared:
        mp.spawn(compare_memory, args=(settings,), nprocs=2)
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
