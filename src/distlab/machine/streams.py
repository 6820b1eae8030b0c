"""Time on a GPU, from events on its stream. Recording them does not block the host; they are read later."""

import functools
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


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU on which numbers are copied to the host, always the same one, of high priority.

    torch has 32 streams of each priority and hands them out in turn, also to NCCL, which asks for the usual priority.
    So a new stream may be one of NCCL's, whose messages would then wait for a number of all ranks.
    """
    return torch.cuda.Stream(device, priority=-1)


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
