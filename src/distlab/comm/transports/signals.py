"""Signals between the ranks of a host: single bytes in pipes.

A signal costs two calls of the kernel and wakes up the thread that waits for it; a message over gloo also has to wake
up gloo's threads at both ends. A wait ends as over gloo: with the signal, at the deadline, or when the other rank dies,
because the kernel then closes its end.

One rank makes the pipes, the first of a group or the sender of a queue. They have no name; the others open their ends
through /proc, as the same user.
A process that a rank forks keeps the rank's ends open, as it does with gloo's connections.
"""

import contextlib
import math
import os
import select
import time
from collections.abc import Sequence

SECONDS_MORE = 0.5  # the first rank waits longer: the others wait for it, and must reach the deadline before it exits
LOST = "Connection closed by peer"  # as in gloo's messages


class Channel:
    """This rank's ends of two pipes between it and another rank."""

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self._writes = reads, writes  # descriptors
        self.received = 0  # signals

    def send(self) -> None:
        """Send a signal; `RuntimeError` if the other rank has exited."""
        try:
            os.write(self._writes, b"\0")
        except BrokenPipeError:
            raise RuntimeError(LOST) from None

    def read(self) -> None:
        """Read all signals that have arrived, at least one; `RuntimeError` if the other rank has exited."""
        signals = os.read(self.reads, 4096)
        if not signals:
            raise RuntimeError(LOST)
        self.received += len(signals)

    def wait(self, times: int, deadline: float) -> None:
        """Return when the other rank has sent a signal `times` times; `RuntimeError` as in `wait_for_all`."""
        wait_for_all([self], times, deadline)

    def close(self) -> None:
        os.close(self.reads)
        os.close(self._writes)


def wait_for_all(channels: Sequence[Channel], times: int, deadline: float, spin_seconds: float = 0.0) -> None:
    """Return when each of the other ranks has sent a signal `times` times.

    Args:
        deadline: by `time.perf_counter`.
        spin_seconds: time for which this thread keeps its core before it sleeps.

    Raises:
        RuntimeError: at the deadline, or as soon as one of the ranks has exited, whatever the others do.
    """
    poll, missing = select.poll(), {channel.reads: channel for channel in channels if channel.received < times}
    for descriptor in missing:
        poll.register(descriptor, select.POLLIN)
    while missing:
        for descriptor in _readable(poll, deadline, spin_seconds):
            channel = missing[descriptor]
            channel.read()
            if channel.received >= times:
                poll.unregister(descriptor)
                del missing[descriptor]


def _readable(poll: select.poll, deadline: float, spin_seconds: float) -> list[int]:
    """Return the descriptors that can be read, at least one; `RuntimeError` at the deadline."""
    ready: list[tuple[int, int]] = []
    sleeps_at = min(time.perf_counter() + spin_seconds, deadline)
    while not ready and time.perf_counter() < sleeps_at:
        ready = poll.poll(0)
    ready = ready or poll.poll(max(1, math.ceil(1000 * (deadline - time.perf_counter()))))
    if not ready:
        raise RuntimeError("Timed out waiting for a signal")
    return [descriptor for descriptor, _ in ready]


def close_all(channels: Sequence[Channel]) -> None:
    for channel in channels:
        channel.close()


def make_pipes(others: int) -> tuple[list[Channel], list[int]]:
    """Make two pipes to each of some other ranks; return this rank's ends, and theirs: one to read and one to write.

    When the others have opened theirs, this rank closes them: only then does another rank's exit close its pipes.

    Raises:
        OSError: too many files are open; no pipe is left.
    """
    with contextlib.ExitStack() as made:  # closes all ends if one cannot be made
        pairs = [(_pipe(made), _pipe(made)) for _ in range(others)]
        made.pop_all()
    far_ends = [end for (read, _), (_, write) in pairs for end in (read, write)]
    return [Channel(read, write) for (_, write), (read, _) in pairs], far_ends


def _pipe(made: contextlib.ExitStack) -> tuple[int, int]:
    """Return the ends of a new pipe, to read and to write."""
    ends = os.pipe()
    for end in ends:
        made.callback(os.close, end)
    return ends


def open_channel(process: int, reads: int, writes: int) -> Channel:
    """Open this rank's ends of the pipes that another rank's process has made; `OSError` if that is not possible."""
    own = os.open(f"/proc/{process}/fd/{reads}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return Channel(own, os.open(f"/proc/{process}/fd/{writes}", os.O_WRONLY | os.O_CLOEXEC))
    except OSError:
        os.close(own)
        raise
