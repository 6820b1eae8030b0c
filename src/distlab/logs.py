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
    """The line a step and the records of a training run.

    Args:
        out: the run's folder, which exists.
        rank: of this process; rank 0 writes `metrics.jsonl`.
        shows_steps: whether this rank's step lines appear on its terminal (they always go to its log).
        tokens_per_step: of the global batch.
        device: whose memory is reported.
    """

    def __init__(self, out: Path, rank: int, shows_steps: bool, tokens_per_step: int, device: torch.device) -> None:
        self._rank, self._shows_steps, self._tokens_per_step, self._device = rank, shows_steps, tokens_per_step, device
        self._metrics = (out / "metrics.jsonl").open("w") if rank == 0 else None
        self._sent_before: Counter[str] = Counter()
        self._seconds: list[float] = []
        self._waited_seconds, self._waited_before = 0.0, traffic.ledger.waited_seconds
        self._loss = float("nan")

    def loss(self, step: int, loss: float) -> None:
        """Print the line of a step; its speed is that of the step before, since this one is not over yet."""
        self._loss = loss
        line = f"{step} {loss:.8f}"
        if self._seconds:
            line += f"  {self._tokens_per_step / self._seconds[-1]:,.0f} tokens/s"
        if self._shows_steps:
            print(line, flush=True)
        elif isinstance(sys.stdout, RankOutput):
            sys.stdout.keep(line + "\n")

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
                "loss": self._loss if math.isfinite(self._loss) else None,  # JSON has no number for it
                "tokens": (step + 1) * self._tokens_per_step,
                "seconds": round(seconds, 6),
                "tokens_per_second": round(self._tokens_per_step / seconds, 1),
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
        tokens = steps * self._tokens_per_step
        say(f"{steps} steps, {tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s")
        say(f"a step took {statistics.median(self._seconds):.3f} s at the median")
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
