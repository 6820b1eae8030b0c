"""The records of a run: `metrics.jsonl`, TensorBoard, a rank's part of `ledger.json`, the summary at the end."""

import contextlib
import json
import math
import resource
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from distlab.comm.context import Context
from distlab.comm.recorder import Ledger, StepTime
from distlab.reports import METRICS
from distlab.run.terminal import StatusLine, counted, say
from simplellm.errors import InputError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LEDGER, LAUNCHER_LOG = "ledger.json", "launcher.log"
AT_THE_END = LEDGER, LAUNCHER_LOG, "memory.json", "trace.json"  # of the steps since a run began or was resumed
SECONDS_TO_MENTION = 10  # work between two steps that takes at least this long gets a separate line


class RunLog:
    """The records of a run's steps: `metrics.jsonl`, written by one rank, and the summary at the end."""

    _tensorboard: "SummaryWriter | None" = None

    def __init__(
        self,
        out: Path,
        context: Context,
        rank: int | None = None,
        writes: bool | None = None,
        *,
        tensorboard: bool = False,
        status: StatusLine | None = None,
    ) -> None:
        self._rank = context.rank if rank is None else rank
        self._out, self._device = out, context.device
        self._ledger, self._waited, self._status = context.ledger, context.waited_so_far, status or StatusLine(None)
        self._has_tensorboard = tensorboard
        self._writes = self._rank == 0 if writes is None else writes
        self._metrics: TextIO | None = None
        self.unit, self._per_step = "", 0
        self.origin = 0  # tokens (or inputs, …) before step 0; not 0 if the checkpoint's run had other batches
        self.times: list[StepTime] = []  # of the steps so far
        self.seconds_apart: defaultdict[str, float] = defaultdict(float)  # outside of steps, by kind of work
        self._sent_before: Counter[str] = Counter()
        self.values: dict[str, Any] = {}  # of the current step, by their names in its record: loss, lr, …

    def begin(self, per_step: int, unit: str, origin: int = 0, continue_at: int | None = None) -> None:
        """Start the records. A step consumes `per_step` of `unit` ("tokens", "inputs"), from `origin` before step 0 on.

        A run that is resumed in its own folder, at step `continue_at`, keeps its earlier records.
        """
        self._per_step, self.unit, self.origin = per_step, unit, origin
        self._sent_before = self._ledger.sent_bytes.copy()
        if self._writes:
            path = self._out / METRICS
            if continue_at is not None:
                from distlab.reports.records import keep_records

                keep_records(path, before=continue_at)
            self._metrics = path.open("w" if continue_at is None else "a")
            if self._has_tensorboard:
                from distlab.run.tensorboard import open_tensorboard

                self._tensorboard = open_tensorboard(self._out, purge_step=continue_at)

    def count(self, steps: int) -> int:
        """Return how many tokens (or inputs, …) have been consumed after a number of steps."""
        return self.origin + steps * self._per_step

    def average_speed(self, steps_per_second: float) -> str:
        """Return a speed, given in steps per second, as a text in units per second."""
        return f"{self._per_step * steps_per_second:,.0f} {self.unit}/s"

    def speed(self) -> str:
        """Return the end of a step's line: the speed of the previous step, since this step has not ended yet."""
        return f"  {self.average_speed(1 / self.times[-1].seconds)}" if self.times else ""

    @contextlib.contextmanager
    def timing_a_step(self) -> Iterator[None]:
        """Time the step that runs inside, from its batch to its update."""
        started, waited = time.perf_counter(), self._waited()
        in_collectives = self._ledger.collective_seconds
        self.values = {}
        yield
        seconds, waited = time.perf_counter() - started, self._waited() - waited
        self.times.append(StepTime(seconds, waited, self._ledger.collective_seconds - in_collectives))

    @contextlib.contextmanager
    def timing_apart(self, kind: str, what: str) -> Iterator[None]:
        """Time work outside of a step; `what` describes it in the status line and in the line for long work."""
        started = time.perf_counter()
        with self._status.instead(what):
            yield
        seconds = time.perf_counter() - started
        self.seconds_apart[kind] += seconds
        if seconds >= SECONDS_TO_MENTION and self._writes:
            say(f"{what} took {seconds:.0f} s")

    def has(self, step: int) -> bool:
        """Return whether the last step, which may be evaluated again after a repair, has its record."""
        return False

    def record(self, step: int) -> None:
        """Write the record of the step that was timed last."""
        seconds, sent = self.times[-1].seconds, self._ledger.sent_bytes.copy()
        record: dict[str, Any] = {
            "step": step,
            "loss": None,
            **self.values,
            self.unit: self.count(step + 1),
            "seconds": round(seconds, 6),
            "waited_seconds": round(self.times[-1].waited, 6),
            "collective_seconds": round(self.times[-1].in_collectives, 6),
            f"{self.unit}_per_second": round(self._per_step / seconds, 1),
            "peak_memory_bytes": peak_memory_bytes(self._device),
            "sent_bytes": dict(sent - self._sent_before),
        }
        self._sent_before = sent
        self._write({name: None if _is_not_finite(value) else value for name, value in record.items()})

    def _write(self, record: dict[str, Any]) -> None:
        if self._metrics is None:  # another rank writes
            return
        try:
            self._metrics.write(json.dumps(record) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise InputError(f"--out {self._out}: cannot write there ({error.strerror}); make room") from error
        if self._tensorboard is not None:
            for name in ("loss", "lr", "grad_norm", "validation_loss", f"{self.unit}_per_second", "peak_memory_bytes"):
                if record.get(name) is not None:
                    self._tensorboard.add_scalar(name, record[name], record["step"])

    def close(self) -> None:
        """Close the files."""
        if self._metrics is not None:
            self._metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def account(self) -> dict[str, Any]:
        """Return this rank's part of `ledger.json`: the seconds of its steps, and the bytes that it sent, by way."""
        messages = self._ledger.messages_to
        return {
            "rank": self._rank,
            "steps": len(self.times),
            "seconds": round(sum(time.seconds for time in self.times), 6),
            "waited_seconds": round(sum(time.waited for time in self.times), 6),
            "collective_seconds": round(sum(time.in_collectives for time in self.times), 6),
            "peak_memory_bytes": peak_memory_bytes(self._device),
            "sent": [{**to._asdict(), "bytes": n, "messages": messages[to]} for to, n in self._ledger.bytes_to.items()],
        }

    def summary(self) -> None:
        """Print the run's speed, its times by activity, the bytes this rank sent by kind, and its peak memory."""
        if self._tensorboard is not None:
            self._tensorboard.flush()
        if self.times:
            seconds_of_steps, waits, _ = zip(*self.times, strict=True)
            steps, seconds, waited = len(self.times), sum(seconds_of_steps), sum(waits)
            count = steps * self._per_step
            done = f"{counted(steps, 'steps')}, {counted(count, self.unit)} in {seconds:.1f} s"
            say(f"{done}: {count / seconds:,.0f} {self.unit}/s")
            say(f"median step time: {statistics.median(seconds_of_steps):.3g} s")
            say(f"rank {self._rank} computed for {seconds - waited:.1f} s and waited {waited:.1f} s for other ranks")
        for line in sent_by_kind(self._rank, self._ledger):
            say(line)
        say(f"peak memory of rank {self._rank}: {human_bytes(peak_memory_bytes(self._device))}")


def sent_by_kind(rank: int, ledger: Ledger) -> Iterator[str]:
    """Yield lines about the bytes and messages that a rank has sent."""
    for kind, count in ledger.sent_bytes.items():
        yield f"rank {rank} sent {human_bytes(count)} of {kind} in {counted(ledger.messages[kind], 'messages')}"


def _is_not_finite(value: Any) -> bool:
    """Return whether a value is nan or infinity, which JSON does not have."""
    return isinstance(value, float) and not math.isfinite(value)


def remove_records_of_the_end(out: Path) -> None:
    for name in AT_THE_END:
        (out / name).unlink(missing_ok=True)


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory: allocated on the GPU for CUDA, else resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def human_bytes(count: int) -> str:
    """Return a number of bytes in decimal units, such as 12.3 MB."""
    count = int(float(f"{count:.3g}"))  # before its unit is chosen: 999,999 bytes are 1 MB
    power = min(max(len(str(count)) - 1, 0) // 3, 4)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
