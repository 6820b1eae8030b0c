"""What a run prints and keeps: a line a step, `metrics.jsonl`, each rank's log, the summary at the end."""

import io
import json
import math
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import TextIO

import torch

from distlab.traffic import traffic


class RankOutput(io.TextIOBase):
    """A rank's standard output: goes to its terminal and to its log.

    Ranks that share a terminal would mix their words: with a `prefix`, each line is written whole, in one piece, and
    says whose it is.
    """

    def __init__(self, terminal: TextIO, prefix: str = "") -> None:
        self.terminal, self.prefix = terminal, prefix
        self._file: TextIO = io.StringIO()  # until the run's folder is known
        self._rest = ""

    def keep_in(self, file: TextIO) -> None:
        """From now on write to `file`, beginning with what has been written so far."""
        assert isinstance(self._file, io.StringIO)
        file.write(self._file.getvalue())
        self._file = file

    def keep(self, text: str) -> None:
        """Write to the log alone."""
        self._file.write(text)

    def write(self, text: str) -> int:
        self.keep(text)
        if not self.prefix:
            self.terminal.write(text)
        else:
            *lines, self._rest = (self._rest + text).split("\n")
            self.terminal.write("".join(f"{self.prefix}{line.removeprefix('# ')}\n" for line in lines))
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        self.terminal.flush()
        self._file.flush()

    def isatty(self) -> bool:
        return self.terminal.isatty()

    def fileno(self) -> int:
        return self.terminal.fileno()


def take_over_output(rank: int, shares_terminal: bool) -> None:
    """Send what this process prints through `RankOutput`; where ranks share a terminal, rank 0's lines are bare."""
    prefix = f"# rank {rank}: " if shares_terminal and rank > 0 else ""
    sys.stdout, sys.stderr = RankOutput(sys.stdout, prefix), RankOutput(sys.stderr, prefix)


def say(text: str) -> None:
    """Print a remark: every line that is not a step's begins with `#`."""
    print(f"# {text}", flush=True)


class RunLog:
    """The records of a run's steps: `metrics.jsonl`, and what they come to at the end.

    Args:
        out: the run's folder, which exists.
        rank: of this process; rank 0 writes `metrics.jsonl`.
        device: whose memory is reported.

    Attributes:
        loss: of the global batch, in the current step.
    """

    def __init__(self, out: Path, rank: int, device: torch.device) -> None:
        self._out, self._rank, self._device = out, rank, device
        self._metrics: TextIO | None = None
        self._per_step, self._unit = 0, ""
        self._seconds: list[float] = []
        self._sent_before: Counter[str] = Counter()
        self._waited_seconds, self._waited_before = 0.0, 0.0
        self.loss = float("nan")

    def expect_steps(self, per_step: int, unit: str) -> None:
        """Begin: each step takes `per_step` of `unit` ("tokens", "inputs") in the global batch."""
        self._per_step, self._unit = per_step, unit
        self._waited_before = traffic.ledger.waited_seconds
        if self._rank == 0:
            self._metrics = (self._out / "metrics.jsonl").open("w")

    def speed(self) -> str:
        """The end of a step's line: the speed of the step before, since this one is not over yet."""
        return f"  {self._per_step / self._seconds[-1]:,.0f} {self._unit}/s" if self._seconds else ""

    def end_step(self, step: int, seconds: float) -> None:
        """Record a step that took `seconds` from its batch to its update."""
        self._seconds.append(seconds)
        self._waited_seconds += traffic.ledger.waited_seconds - self._waited_before
        self._waited_before = traffic.ledger.waited_seconds
        sent = traffic.ledger.sent_bytes.copy()
        sent_now, self._sent_before = sent - self._sent_before, sent
        if self._metrics is not None:
            record = {
                "step": step,
                "loss": self.loss if math.isfinite(self.loss) else None,  # JSON has no number for it
                self._unit: (step + 1) * self._per_step,
                "seconds": round(seconds, 6),
                f"{self._unit}_per_second": round(self._per_step / seconds, 1),
                "peak_memory_bytes": peak_memory_bytes(self._device),
                "sent_bytes": dict(sent_now),
            }
            self._metrics.write(json.dumps(record) + "\n")
            self._metrics.flush()

    def summary(self) -> None:
        """Say how fast the run was, and where the time went."""
        if not self._seconds:
            return
        steps, seconds, waited = len(self._seconds), sum(self._seconds), self._waited_seconds
        count = steps * self._per_step
        say(f"{steps} steps, {count:,} {self._unit} in {seconds:.1f} s: {count / seconds:,.0f} {self._unit}/s")
        say(f"a step took {statistics.median(self._seconds):.3g} s at the median")
        say(f"rank {self._rank} computed for {seconds - waited:.1f} s and waited {waited:.1f} s for other ranks")


def say_costs(rank: int, device: torch.device) -> None:
    """Say what this rank has sent, by kind, and how much memory it took."""
    for kind, sent in traffic.ledger.sent_bytes.items():
        say(f"rank {rank} sent {human_bytes(sent)} of {kind} in {traffic.ledger.messages[kind]:,} messages")
    say(f"rank {rank} had {human_bytes(peak_memory_bytes(device))} of memory at the peak")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held: on the GPU for CUDA, else resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def human_bytes(count: int) -> str:
    """12.3 MB and the like, in powers of ten."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"
