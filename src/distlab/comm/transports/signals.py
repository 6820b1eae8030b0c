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
from collections import Counter
from collections.abc import Callable, Sequence

SECONDS_MORE = 0.5  # the first rank waits longer: the others wait for it, and must reach the deadline before it exits
LOST = "Connection closed by peer"  # as in gloo's messages


class Channel:
    """This rank's ends of two pipes between it and another rank."""

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self._writes = reads, writes  # descriptors
        self._poll = select.poll()
        self._poll.register(reads, select.POLLIN)
        self._received: Counter[int] = Counter()  # by signal
        self.after_read: list[Callable[[], object]] = []  # called when signals have been read

    def send(self, signal: int) -> None:
        """Send a signal, a number below 256; `RuntimeError` if the other rank has exited."""
        try:
            os.write(self._writes, bytes([signal]))
        except BrokenPipeError:
            raise RuntimeError(LOST) from None

    def wait(self, signal: int, times: int, deadline: float, spin_seconds: float = 0.0) -> None:
        """Return when the other rank has sent a signal `times` times.

        Args:
            deadline: by `time.perf_counter`.
            spin_seconds: time for which this thread keeps its core before it sleeps.

        Raises:
            RuntimeError: at the deadline, or if the other rank has exited.
        """
        while not self.has(signal, times):
            _poll(self._poll, deadline, spin_seconds)
            self.read()

    def has(self, signal: int, times: int) -> bool:
        """Return whether a signal has been read `times` times."""
        return self._received[signal] >= times

    def read(self) -> None:
        """Read all signals that have arrived, at least one; `RuntimeError` if the other rank has exited."""
        signals = os.read(self.reads, 4096)
        if not signals:
            raise RuntimeError(LOST)
        self._received.update(signals)
        for call in self.after_read:
            call()

    def close(self) -> None:
        os.close(self.reads)
        os.close(self._writes)


def wait_for_all(
    channels: Sequence[Channel], signal: int, times: int, deadline: float, spin_seconds: float = 0.0
) -> None:
    """Return when all the other ranks have sent a signal `times` times; `RuntimeError` as in `Channel.wait`.

    The first rank that exits is noticed, whatever the others do.
    """
    missing = {channel.reads: channel for channel in channels if not channel.has(signal, times)}
    if len(missing) == 1:
        [channel] = missing.values()
        channel.wait(signal, times, deadline, spin_seconds)
        return
    poll = select.poll()
    for descriptor in missing:
        poll.register(descriptor, select.POLLIN)
    while missing:
        for descriptor in _poll(poll, deadline, spin_seconds):
            channel = missing[descriptor]
            channel.read()
            if channel.has(signal, times):
                poll.unregister(descriptor)
                del missing[descriptor]


def _poll(poll: select.poll, deadline: float, spin_seconds: float) -> list[int]:
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


class Pipes:
    """The pipes between a rank and each of some others, made by that rank."""

    def __init__(self) -> None:
        self.far_ends: list[int] = []  # the others' descriptors: for each rank one to read and one to write

    def make(self, others: int) -> list[Channel]:
        """Make the pipes, and return this rank's ends; `OSError`, and no pipe is left, if too many files are open."""
        with contextlib.ExitStack() as made:  # closes all ends if one cannot be made
            pairs = [(_pipe(made), _pipe(made)) for _ in range(others)]
            made.pop_all()
        self.far_ends = [end for (read, _), (_, write) in pairs for end in (read, write)]
        return [Channel(read, write) for (_, write), (read, _) in pairs]

    def hand_over(self) -> None:
        """Close the others' ends, once they have opened them: only then does their exit close the pipes."""
        while self.far_ends:
            os.close(self.far_ends.pop())


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


class Signal:
    """A signal that all ranks of a group send repeatedly, with a count.

    Two ranks send it to each other. More send it to the first, which passes it on when it has arrived from all: two
    signals in a row, but fewer in total, and where ranks share cores every signal takes a core from another rank.

    Args:
        signal: its number.
        channels: to the first rank, or, on the first rank, to all others.
        passes_on: whether this is the first of more than two ranks.
        spin_seconds: time for which a wait keeps its core before it sleeps.
    """

    def __init__(self, signal: int, channels: Sequence[Channel], passes_on: bool, spin_seconds: float) -> None:
        self._signal, self._channels, self._passes_on = signal, channels, passes_on
        self._spin_seconds = spin_seconds
        self.sent = 0  # times
        self.received = 0  # times that it has arrived from all others

    def send(self) -> int:
        """Send it, and return how many times it was sent; the first rank passes it on when all others have sent it."""
        self.sent += 1
        if self._passes_on:
            self.receive()
        else:
            self._send()
        return self.sent

    def _send(self) -> None:
        for channel in self._channels:
            channel.send(self._signal)

    def wait(self, times: int, deadline: float) -> None:
        """Return when all others have sent it `times` times; `RuntimeError` as in `Channel.wait`."""
        while self.received < times:
            later = deadline + SECONDS_MORE * self._passes_on
            wait_for_all(self._channels, self._signal, self.received + 1, later, self._spin_seconds)
            self.receive()

    def receive(self) -> None:
        """Count the times that have arrived from all others.

        The first rank, which has to have sent it as well, passes it on, also while it waits for a different signal:
        the others may wait for this one first.
        """
        while self.received < self.sent and all(one.has(self._signal, self.received + 1) for one in self._channels):
            self.received += 1
            if self._passes_on:
                self._send()
