"""Waits for other ranks: their names, their deadlines, and how a failed wait is reported.

Over gloo, the rank's thread waits, and gloo enforces the deadline. In shared memory, it waits for signals in pipes, and
signals.py enforces it. Over NCCL the GPU's stream waits while the thread queues further work: CUDA events show when the
stream waits, and `Waits.watch` enforces the deadline.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from distlab.comm.recorder import Ledger


class Wait(NamedTuple):
    """A wait of a rank for other ranks."""

    what: str  # e.g. "the activations of micro-batch 2"
    way: Literal["send", "receive", "collective", "other"]  # "other" if only the name is known
    peers: tuple[int, ...] = ()  # the other ranks that must take part
    number: int = 0  # of a collective: its index among the collectives of the same ranks
    line: str = ""  # the line of the script that waits, if nothing better names the wait
    kind: str = ""  # the ledger's column for what is sent
    flow: str = ""  # of a message to be received: what identifies it in a trace

    def sentence(self, describe: Callable[[int], str]) -> str:
        """Return it in words: "the gradients from ranks 0 and 2", "rank 1 (stage 1) to receive the activations"."""
        at = f", {self.line}" if self.line else ""
        if self.way == "send" and self.what == "send":  # without a name of its own
            return f"send to {describe(self.peers[0])}{at}"
        if self.way == "send":
            return f"{describe(self.peers[0])} to receive {self.what}{at}"
        if self.way == "receive":
            return f"{self.what} from {describe(self.peers[0])}{at}"
        return f"{self.what} from {list_ranks(self.peers)}{at}" if self.way == "collective" else f"{self.what}{at}"


class TrafficError(RuntimeError):
    """A wait for other ranks that failed; `wait` is None if it is not known which wait failed."""

    def __init__(self, sentence: str, cause: Exception, wait: Wait | None = None) -> None:
        super().__init__(sentence)
        self.lost_a_peer = is_lost_peer(cause)  # otherwise a peer did not answer within the deadline
        self.wait = wait


class StreamWait(NamedTuple):
    """A wait of the stream, from `reached` (all earlier work is done) to `done`."""

    wait: Wait
    reached: torch.cuda.Event
    done: torch.cuda.Event


class StreamWaits:
    """The stream's waits over NCCL, in stream order."""

    def __init__(self) -> None:
        self._waits: deque[StreamWait] = deque()
        self._seen: tuple[StreamWait, float] | None = None  # the current wait, and when it was first seen
        self._lock = threading.Lock()  # other threads ask for the current wait

    def add(self, wait: StreamWait) -> None:
        with self._lock:
            self._waits.append(wait)

    def under_way(self) -> tuple[Wait, float] | None:
        """Return the stream's current wait, and its start on `time.perf_counter()`; None if it computes or is idle."""
        with self._lock:
            first = next((one for one in self._waits if not one.done.query()), None)
            if first is None or not first.reached.query():
                return None
            if self._seen is None or self._seen[0] is not first:
                self._seen = first, time.perf_counter()
            return first.wait, self._seen[1]

    def collect(self, ledger: Ledger) -> None:
        """Add the waits that have ended since the last call."""
        with self._lock:
            # A future's two events are on two streams: `done` may come first, and then there was no wait.
            while self._waits and self._waits[0].done.query() and self._waits[0].reached.query():
                ended = self._waits.popleft()
                seconds = max(0.0, ended.reached.elapsed_time(ended.done) / 1000)
                ledger.waited(seconds, ended.wait.way == "collective")


class Waits:
    """This rank's waits for other ranks, each with a name and a deadline.

    `describe` returns the name of a rank, as in "rank 4 (stage 1 of replica 1)".
    """

    def __init__(self, rank: int, world_size: int, ledger: Ledger, describe: Callable[[int], str]) -> None:
        self._rank, self._ranks, self._ledger, self._describe = rank, range(world_size), ledger, describe
        self.timeout_seconds, self.timeout_name = 120.0, "--timeout"
        self.seconds_for_the_watch = 60.0  # to find out which rank waits for which, before NCCL ends the process
        self.in_libraries: dict[int, tuple[Wait, float]] = {}  # waits of libraries with their starts, oldest first
        self.of_stream = StreamWaits()
        self.waiting: tuple[Wait, float] | None = None  # of this rank's thread: the innermost wait, and its start
        self._is_closed = threading.Event()

    def watch(self, fail: Callable[[TrafficError], object], device: torch.device) -> None:
        """Until `close`, call `fail` in a thread if a wait of the stream, or a call of NCCL, passes the deadline."""

        def look() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # or its questions about events would open a context on the first GPU
            while not self._is_closed.wait(min(0.2, self.timeout_seconds / 4)):
                wait, started = self._under_way() or (None, 0.0)
                if wait is not None and wait.peers and time.perf_counter() - started > self.timeout_seconds:
                    fail(self.failed(wait, started, TimeoutError("timed out")))
                    return

        threading.Thread(target=look, daemon=True).start()

    def close(self) -> None:
        """End the thread of `watch`."""
        self._is_closed.set()

    def during(self, name: str | Wait) -> "During":
        """Return a context in which a wait that fails raises a `TrafficError`: which rank waited how long for `name`.

        In the context, `waits_for` returns this wait. Errors that do not concern other ranks are raised unchanged.
        """
        if isinstance(name, str):
            name = Wait(name, "other", tuple(rank for rank in self._ranks if rank != self._rank))
        return During(self, name)

    def waited_so_far(self) -> float:
        """Return the seconds that this rank's thread, and its stream so far, have waited for others."""
        self.of_stream.collect(self._ledger)
        return self._ledger.waited_seconds

    def waits_for(self, at_least_seconds: float = 0.0) -> Wait | None:
        """Return this rank's current wait (of its thread, a library or its stream); None if there is none that long."""
        under_way = self._under_way()
        if under_way is None or time.perf_counter() - under_way[1] < at_least_seconds:
            return None
        return under_way[0]

    def _under_way(self) -> tuple[Wait, float] | None:
        in_library = next(iter(list(self.in_libraries.values())), None)
        all_kinds = self.waiting, in_library, self.of_stream.under_way()
        return min((wait for wait in all_kinds if wait is not None), key=lambda wait: wait[1], default=None)

    def failure_of(self, error: BaseException) -> TrafficError | None:
        """Return the failed wait behind an error that a library raised; None if the error has a different cause."""
        if not isinstance(error, RuntimeError):
            return None
        if self.in_libraries and (is_lost_peer(error) or is_timeout(error)):
            return self.failed(*next(iter(self.in_libraries.values())), error)
        if is_lost_peer(error):
            why = reason(error, self.timeout_name)
            return TrafficError(f"{self._describe(self._rank)} lost its connection: {why}", error)
        return None

    def failed(self, wait: Wait, started: float, error: Exception) -> TrafficError:
        """Return the error for a wait that began at `started` and ended in `error`."""
        seconds, who = time.perf_counter() - started, self._describe(self._rank)
        why = reason(error, self.timeout_name)
        return TrafficError(f"{who} waited {seconds:.1f} s for {wait.sentence(self._describe)}: {why}", error, wait)


class During:
    """See `Waits.during`; a class, because each message enters two of them, and a generator takes twice as long."""

    def __init__(self, waits: Waits, wait: Wait) -> None:
        self._waits, self._wait = waits, wait

    def __enter__(self) -> None:
        self._outer, self._started = self._waits.waiting, time.perf_counter()
        self._waits.waiting = self._wait, self._started

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._waits.waiting = self._outer
        if not isinstance(error, RuntimeError) or isinstance(error, TrafficError):
            return  # another kind of error, or that of an inner wait, whose message is more specific
        if is_lost_peer(error) or is_timeout(error):
            raise self._waits.failed(self._wait, self._started, error) from error


def group_key(ranks: Sequence[int]) -> str:
    """Return the ranks of a collective as a key: "0,1,2"."""
    return ",".join(map(str, sorted(ranks)))


def list_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks in words: "rank 2", "ranks 0 and 2", "ranks 0, 1 and 3"."""
    names = [str(rank) for rank in ranks]
    if len(names) < 2:
        return f"rank {''.join(names)}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def reason(error: Exception, timeout_name: str = "--timeout") -> str:
    """Return the reason in an error from gloo or NCCL, in a few words; `timeout_name` is what sets the deadline."""
    if is_lost_peer(error):
        return "a rank has exited and closed its connection"
    if is_timeout(error):
        return f"no answer ({timeout_name} sets how long to wait)"
    return (str(error).splitlines() or [type(error).__name__])[0]


def is_timeout(error: Exception) -> bool:
    return re.search(r"timed? ?out", str(error), re.IGNORECASE) is not None


def is_lost_peer(error: Exception) -> bool:
    """Return whether an error says that another rank has exited or cannot be reached."""
    signs = (
        r"closed by peer|reset by peer|broken pipe|socket closed|connection.*(closed|refused)|no route to host|"
        r"unreachable|ncclRemoteError|remote process"
    )
    return isinstance(error, RuntimeError) and re.search(signs, str(error), re.IGNORECASE) is not None
