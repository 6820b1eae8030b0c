"""Records what a rank does and when (`--trace`): computing, waiting, messages, and the activations that it keeps."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

STEP, COMPUTE, WAIT, MESSAGE = "step", "compute", "wait", "message"


@dataclass(frozen=True)
class Event:
    """Something that a rank did.

    Attributes:
        kind: `STEP`, `COMPUTE`, `WAIT`, or `MESSAGE`: a collective from its start, or a receive from its posting, until
            it is known to be complete.
        name: "F2", "the gradients of micro-batch 1 from rank 2", …
        start, end: seconds of the host's clock.
    """

    kind: str
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Recorder:
    """Collects events while `enabled`; else it costs next to nothing.

    Attributes:
        events: in the order in which they ended.
        kept_bytes: (seconds, bytes of activations kept at that time), in order.
        programs: the pipeline's schedule, where there is one.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.events: list[Event] = []
        self.kept_bytes: list[tuple[float, int]] = []
        self.programs: Sequence[Sequence[Any]] | None = None
        self._to_clock = time.time() - time.perf_counter()  # ranks of one host share this clock

    @contextlib.contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        """Record what happens inside."""
        started = time.perf_counter()
        yield
        if self.enabled and kind == COMPUTE and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # what has been launched has not been computed
        self.add(kind, name, started)

    def add(self, kind: str, name: str, started: float) -> None:
        """Record something that began at `started`, of `time.perf_counter()`, and ends now."""
        if self.enabled:
            self.events.append(Event(kind, name, started + self._to_clock, time.perf_counter() + self._to_clock))

    def keeps(self, kept_bytes: int) -> None:
        """Record how many bytes of activations are kept now."""
        if self.enabled:
            self.kept_bytes.append((time.perf_counter() + self._to_clock, kept_bytes))

    def as_json(self) -> dict[str, Any]:
        """Everything recorded, as plain values."""
        return {"events": [[e.kind, e.name, e.start, e.end] for e in self.events], "kept_bytes": self.kept_bytes}


recorder = Recorder()
