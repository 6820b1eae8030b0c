"""Time on a GPU: events that its stream passes. They cost the host nothing, and are read once the GPU is past them."""

import time

import torch


def passed() -> torch.cuda.Event:
    """A mark at this point of the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class StreamClock:
    """Tells when the stream passed an event, in seconds of `time.perf_counter()`."""

    def __init__(self) -> None:
        self._start = passed()
        self._start.synchronize()
        self._started = time.perf_counter()

    def seconds(self, event: torch.cuda.Event) -> float:
        """When the stream passed an event; waits until then."""
        event.synchronize()
        return self._started + self._start.elapsed_time(event) / 1000
