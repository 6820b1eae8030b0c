"""The records of a rank: the messages it sends and, with `--trace`, when it computes, waits and keeps activations."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

    from distlab.machine.streams import StreamClock

STEP, COMPUTE, WAIT, MESSAGE, SEND = "step", "compute", "wait", "message", "send"
REPAIR, DEATH = "repair", "death"  # with `--repair`: what a survivor does, and what it has been told
PART = "part"  # of what a rank computes: inside of a `COMPUTE`, or of a step without any
RING_STEP = "ring step "  # and its number: the name of a `PART`


class Destination(NamedTuple):
    """Where bytes of a kind went."""

    kind: str
    way: Literal["send", "receive", "collective", "other"]
    peers: tuple[int, ...]  # the receiver of a message; the other ranks of a collective


@dataclass
class Ledger:
    """The bytes and messages that this rank has sent, by kind, and the seconds that it has waited."""

    sent_bytes: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)  # messages and collectives started
    bytes_to: Counter[Destination] = field(default_factory=Counter)  # `sent_bytes`, by the ranks that take part
    messages_to: Counter[Destination] = field(default_factory=Counter)
    waited_seconds: float = 0.0  # waiting for other ranks, and moving data in shared memory
    collective_seconds: float = 0.0  # of these, in collectives

    def count(self, to: Destination, sent_bytes: int) -> None:
        """Add a message or collective."""
        self.sent_bytes[to.kind] += sent_bytes
        self.messages[to.kind] += 1
        self.bytes_to[to] += sent_bytes
        self.messages_to[to] += 1

    def waited(self, seconds: float, in_collective: bool) -> None:
        """Add a wait for other ranks.

        In shared memory, the work of this rank's thread also counts: its additions, its copy of a message. So the
        seconds are the time that a transfer takes from a step, as over gloo, and as in a prediction.
        """
        self.waited_seconds += seconds
        self.collective_seconds += seconds * in_collective


class StepTime(NamedTuple):
    """Seconds of a step on this rank."""

    seconds: float
    waited: float  # for other ranks
    in_collectives: float  # part of `waited`; the rest are messages, of pipelines and rings


class Event(NamedTuple):
    """A recorded interval of a rank's activity; times in seconds of the host's clock.

    A `MESSAGE` lasts from the start of a collective, or the posting of a receive, until it is known to be complete; a
    `SEND` until the call that starts to send a message returns.
    """

    kind: str
    name: str  # "F2", "the gradients of micro-batch 1 from rank 2", …
    start: float
    end: float
    flow: str = ""  # identifies a message: the same in its `SEND` as in the `WAIT` for it on the receiver

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Recorder:
    """Collects events while `enabled`, of each kind in the order of their ends; otherwise its cost is negligible."""

    def __init__(self) -> None:
        self.enabled = False
        self.is_over_nccl = False  # then times are measured on the GPU's stream
        self.events: list[Event] = []
        self.kept_bytes: list[tuple[float, int]] = []  # (seconds, bytes of activations kept then)
        self.programs: Sequence[Sequence[Any]] | None = None  # of the pipeline's schedule, if there is one
        self.pipelines = 1  # that follow these programs together
        # To the time of day, which the ranks of a host share. If the thread is interrupted, a difference is too small.
        self._to_clock = max(time.time() - time.perf_counter() for _ in range(20))
        self._on_stream: list[tuple[StreamClock, str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._clock: StreamClock | None = None  # of the step; over NCCL only

    @contextlib.contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        """Record the code inside as an event.

        On a GPU over NCCL, the times of computation and waits are the times at which the GPU's stream reaches them.
        Over gloo, the thread waits for messages, so it also waits for the computation that it launched: then both are
        measured with the same clock.
        """
        if self.enabled and kind == STEP and self.is_over_nccl:
            from distlab.machine.streams import StreamClock

            self._clock = StreamClock()
        if self._clock is not None and kind in (COMPUTE, PART):
            from distlab.machine.streams import passed

            start = passed()
            yield
            self.add_on_stream(kind, name, start, passed())
            return
        started = time.perf_counter()
        yield
        if self.enabled and kind in (COMPUTE, PART):
            import torch  # here, because readers of traces do without it

            if torch.cuda.is_initialized():
                torch.cuda.current_stream().synchronize()
        self.add(kind, name, started)

    def add_on_stream(self, kind: str, name: str, start: "torch.cuda.Event", end: "torch.cuda.Event") -> None:
        """Record an interval between two events of the stream, within a step."""
        if self._clock is not None:
            self._on_stream.append((self._clock, kind, name, start, end))

    def add(self, kind: str, name: str, started: float, flow: str = "") -> None:
        """Record an interval that began at `started`, a value of `time.perf_counter()`, and ends now."""
        if self.enabled:
            ended = time.perf_counter()
            self.events.append(Event(kind, name, started + self._to_clock, ended + self._to_clock, flow))

    def keeps(self, kept_bytes: int) -> None:
        """Record how many bytes of activations are kept now."""
        if self.enabled:
            self.kept_bytes.append((time.perf_counter() + self._to_clock, kept_bytes))

    def as_json(self) -> dict[str, Any]:
        for clock, kind, name, *ends in self._on_stream:
            started, ended = (clock.seconds(end) + self._to_clock for end in ends)
            self.events.append(Event(kind, name, started, ended))
        self._on_stream = []
        return {"events": self.events, "kept_bytes": self.kept_bytes}
