"""Time on a GPU, from events on its stream. Recording them does not block the host; they are read later."""

import time

import torch


def passed() -> torch.cuda.Event:
    """Return a timing event recorded at this point of the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


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
