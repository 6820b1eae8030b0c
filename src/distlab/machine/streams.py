"""Time on a GPU, from events on its stream. Recording them does not block the host; they are read later."""

import time
from collections.abc import Callable
from typing import Any

import torch

MARKS = 1 << 16  # that can be told apart: a stream is less far behind the host


def passed() -> torch.cuda.Event:
    """Return a timing event recorded at this point of the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in pinned memory of the host to which the current stream copies this one."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


class StreamClock:
    """Converts an event of the stream to a time, in seconds of `time.perf_counter()`."""

    def __init__(self) -> None:
        self._start = passed()
        self._start.synchronize()
        self._started = time.perf_counter()

    def seconds(self, event: torch.cuda.Event) -> float:
        """Return the time at which the stream reached an event; wait until it has."""
        event.synchronize()
        return self._started + self._start.elapsed_time(event) / 1000


class EventMarks:
    """Marks of a stream that are its events: to ask for one is a call of CUDA, which may wait for other calls."""

    def mark(self, event: torch.cuda.Event) -> torch.cuda.Event:
        return event

    def has_passed(self, event: torch.cuda.Event) -> bool:
        return event.query()


def on_side_stream() -> Callable[[torch.cuda.Event, Callable[[], object]], object]:
    """Return a function (an event, work) that gives the work to a side stream, which waits for the event first."""
    side = torch.cuda.Stream()

    def give(event: torch.cuda.Event, work: Callable[[], object]) -> None:
        side.wait_event(event)
        with torch.cuda.stream(side):
            work()

    return give


class HostMarks:
    """Marks of a stream that it passes in order, numbered in memory of the host: any thread may look at any time.

    While CUDA loads a kernel, which may have to wait until the GPU is idle, other calls of CUDA may wait as well, and
    keep Python's lock. A look at memory calls nothing. The GPU copies the number of each mark there; a copy needs no
    kernel.

    Args:
        device: of the stream.
        after: gives work to the GPU that follows an event, in the order of these calls.
    """

    def __init__(self, device: torch.device, after: Callable[[Any, Callable[[], object]], object]) -> None:
        self._numbers = torch.arange(MARKS).to(device)
        self._latest = torch.zeros((), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._after, self._made, self._passed = after, 0, 0

    def mark(self, event: Any) -> int:
        """Return the number of a mark at the place of an event of the stream."""
        self._look()
        self._made += 1
        number = self._numbers[self._made % MARKS]
        self._after(event, lambda: self._latest.copy_(number, non_blocking=True))
        return self._made

    def has_passed(self, mark: int) -> bool:
        return mark <= self._look()

    def _look(self) -> int:
        """Return the number of the latest mark that the stream has passed, which it copies without the full turns."""
        passed = self._passed  # read before `_latest`, which another thread may then only find further on
        self._passed = passed = passed + (int(self._latest) - passed) % MARKS
        return passed
