"""Broadcast, reduce, all-reduce, gather, all-to-all: each in several topologies, counted, predicted and measured.

    python collectives/compare_collectives.py <rank>  in four terminals, with the ranks 0 to 3
    ./launch.sh compare-collectives --world-size 8    all ranks at once

What does a collective cost? A message costs a fixed latency plus a time per byte; adding and copying also cost a time
per byte. The script first measures these costs. Then the algorithms in distlab.collectives run in a simulated world,
which predicts their times, and then over gloo, beside the library's own collectives and an all-reduce in shared memory.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist

from distlab.comm.context import SMALLEST_SHARED_BYTES, during
from distlab.comm.group import empty, shares
from distlab.comm.names import named
from distlab.machine.network import patient_threads
from distlab.run.logs import human_bytes
from distlab.run.main import main
from distlab.run.run import Run
from distlab.run.terminal import say
from distlab.settings.common import RunSettings, WorldSize, require_positive
from distlab_planner.collective_model import (
    LIBRARY,
    CostModel,
    TimedWork,
    bytes_of_a_message,
    operations,
    predict_collective,
    whole_numbers,
)
from distlab_planner.collective_probes import costs_for, fit_costs, measure
from distlab_planner.model import NUMBER_BYTES
from simplellm.errors import InputError, require

SHARED = "shared"  # memory: no topology, because every rank reads and writes all the others' memory


@dataclass
class CollectivesSettings(WorldSize, RunSettings):
    world_size: int = 4
    """ranks"""
    sizes: list[int] = field(
        default_factory=lambda: [k * 1000 for k in (1, 4, 16, 64, 250, 1000, 4000, 16_000, 64_000)]
    )
    """bytes of the tensors, rounded up so that each rank has the same number of elements"""
    rounds: int = 5
    """number of measurements of each, of which the median is printed"""

    def check(self) -> None:
        super().check()
        require_positive(self, "rounds")
        if not self.sizes or min(self.sizes) < 1:
            raise InputError(f"--sizes {' '.join(map(str, self.sizes))}: give one or more numbers of bytes, from 1 up")
        require(self.device == "cpu", "the handwritten collectives run on the CPU: leave --device out")


DEFAULTS = CollectivesSettings(device="cpu", backend="gloo")


@dataclass
class Row:
    """The result of one operation, topology and size. The library's messages are not known."""

    operation: str
    topology: str
    size_bytes: int
    measured_seconds: float
    predicted_seconds: float | None = None
    busiest_messages: int | None = None
    busiest_bytes: int | None = None

    def __str__(self) -> str:
        line = f"{human_bytes(self.size_bytes):>9}  {self.topology:<10}"
        if self.predicted_seconds is None or self.busiest_bytes is None:
            return f"{line}{'':32}{self.measured_seconds * 1e3:9.2f} ms       "
        sent = f"{self.busiest_messages:8} {human_bytes(self.busiest_bytes):>10}"
        ratio = f"{self.measured_seconds / self.predicted_seconds:7.2f}" if self.predicted_seconds else f"{'':7}"
        return f"{line}{sent}{self.predicted_seconds * 1e3:10.2f} ms{self.measured_seconds * 1e3:9.2f} ms{ratio}"


def compare(run: Run[CollectivesSettings]) -> None:
    args = run.settings
    sizes = [whole_numbers(size_bytes, run.world_size) for size_bytes in args.sizes]
    with waiting_for("the calibration"):
        fitted = fit_costs()
    with patient_threads():
        over_gloo = dist.new_group(backend="gloo")  # with its own collectives, and no memory of the lab's
    rows: list[Row] = []
    if run.rank == 0:
        for message_bytes, costs in fitted.items():
            say(f"{human_bytes(message_bytes)} at a time: {costs}")
        for asked, size_bytes in zip(map(human_bytes, args.sizes), map(human_bytes, sizes), strict=True):
            if size_bytes != asked:
                say(f"{size_bytes} instead of {asked}, so that each rank has the same number of elements of 4 bytes")
    for operation in operations(0):
        if run.rank == 0:
            say(f"{operation}: messages and bytes of the busiest rank; * marks the fastest")
            say(f"{'':21}messages      bytes    predicted    measured  ratio")
        for size_bytes in sizes:
            measured = []
            works = operations(size_bytes, group=over_gloo)[operation]
            if operation == "all-reduce":
                works |= in_shared_memory(size_bytes)
            for topology, work in works.items():
                with waiting_for(f"the {operation} of {human_bytes(size_bytes)} ({topology})"):
                    measured.append(Row(operation, topology, size_bytes, measure(work, args.rounds)))
            rows += measured
            if run.rank == 0:
                show(measured, run.world_size, fitted)
    if run.rank == 0:
        from distlab_figures.runs import collectives as draw

        (run.out / "collectives.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
        draw(run.out / "collectives.png", run.out)


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Name all messages sent inside; a failed wait has the name in its error."""
    with during(what), named(what, "collectives by hand"):
        yield


def in_shared_memory(size_bytes: int) -> dict[str, TimedWork]:
    """Return the lab's all-reduce in memory that the ranks share; {} where they do not share any."""
    memory = empty(max(size_bytes, SMALLEST_SHARED_BYTES) // NUMBER_BYTES, torch.empty(0))
    tensor = memory[: size_bytes // NUMBER_BYTES]

    def all_reduce() -> None:
        with named("the sum", "sums in shared memory"):
            dist.all_reduce(tensor)

    return {SHARED: all_reduce} if shares(tensor) else {}


def show(rows: list[Row], world_size: int, fitted: dict[int, CostModel]) -> None:
    """Predict the times of the lab's own topologies, and print a line for each."""
    fastest = min(rows, key=lambda row: row.measured_seconds)
    for row in rows:
        if row.topology not in (LIBRARY, SHARED):
            what = row.operation, row.topology, row.size_bytes, world_size
            world = predict_collective(*what, costs_for(bytes_of_a_message(*what), fitted))
            row.predicted_seconds = world.makespan
            row.busiest_messages = max(rank.sends + rank.receives for rank in world.counts)
            row.busiest_bytes = max(rank.sent_bytes + rank.received_bytes for rank in world.counts)
        say(f"{row}{' *' if row is fastest else ''}")


if __name__ == "__main__":
    main(compare, DEFAULTS, __doc__)
