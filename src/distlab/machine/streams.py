"""Time on a GPU, from events on its stream. Recording them does not block the host; they are read later."""

import time

import torch


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
