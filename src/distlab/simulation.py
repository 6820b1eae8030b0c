"""A world simulated in one process: ranks are threads, messages are copies, and time is computed, not measured.

Code that talks through `torch.distributed`'s `send`, `recv`, `isend`, `irecv`, `barrier`, `get_rank` and
`get_world_size` runs unchanged. A message takes latency + size / bandwidth on a virtual clock, so that the cost of an
algorithm is known for more ranks than there are machines (the postal model; Hockney, "The communication challenge for
MPP", 1994).
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor


class Deadlock(RuntimeError):
    """All ranks wait, and none can go on."""


@dataclass(frozen=True)
class Link:
    """What a message costs.

    Attributes:
        latency_seconds: of any message, however small.
        bytes_per_second: of its content.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")

    def seconds(self, size_bytes: int) -> float:
        return self.latency_seconds + size_bytes / self.bytes_per_second


@dataclass
class Message:
    """A send or a receive under way; `done_seconds` is set when both ends have met."""

    world: "SimulatedWorld"
    rank: int
    peer: int
    is_send: bool
    tensor: Tensor
    ready_seconds: float
    done_seconds: float | None = None

    def wait(self) -> None:
        """Return when the message has been passed on; the rank's clock then shows that time."""
        self.world.wait_for(self)

    def __str__(self) -> str:
        return f"to send to rank {self.peer}" if self.is_send else f"for a message from rank {self.peer}"


@dataclass
class Counts:
    """What one rank has sent and received.

    Attributes:
        sends, receives: messages.
        sent_bytes: their content.
        sent_to: the ranks that it sent to, in order.
    """

    sends: int = 0
    receives: int = 0
    sent_bytes: int = 0
    sent_to: list[int] = field(default_factory=list)


class SimulatedWorld:
    """`size` ranks that run the same function, each in a thread of its own.

    A send returns when its receiver has taken the message: the strictest behaviour that `torch.distributed` allows.

    Args:
        size: number of ranks.
        link: what a message costs.
        links: what it costs on single links, by (sender, receiver).

    Attributes:
        counts: by rank.
        seconds: by rank, what its virtual clock shows.
    """

    def __init__(
        self, size: int, link: Link | None = None, links: Mapping[tuple[int, int], Link] | None = None
    ) -> None:
        self.size, self._link, self._links = size, link or Link(), dict(links or {})
        self.counts = [Counts() for _ in range(size)]
        self.seconds = [0.0] * size
        self._here = threading.local()
        self._lock = threading.Lock()
        self._changed = [threading.Condition(self._lock) for _ in range(size)]
        self._unmatched: dict[tuple[int, int, bool], deque[Message]] = defaultdict(deque)
        self._waiting: dict[int, Message | None] = {}  # None: in the barrier
        self._running = 0
        self._in_barrier: set[int] = set()
        self._failure: BaseException | None = None

    @property
    def makespan(self) -> float:
        """Seconds until the last rank has finished."""
        return max(self.seconds)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Run `work(rank)` on every rank, and return what each returned.

        Raises:
            Deadlock: all ranks wait; the sentence says who waits for whom.
            Exception: what the first rank that failed raised.
        """
        results: list[Any] = [None] * self.size

        def run_rank(rank: int) -> None:
            self._here.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                with self._lock:
                    self._fail(error)
            finally:
                with self._lock:
                    self._running -= 1
                    self._check_for_deadlock()

        self._running = self.size
        usual = threading.stack_size(512 * 1024)  # a thousand ranks fit
        try:
            with self._stand_in():
                ranks = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(self.size)]
                for thread in ranks:
                    thread.start()
                for thread in ranks:
                    thread.join()
        finally:
            threading.stack_size(usual)
        if self._failure is not None:
            raise self._failure
        return results

    @contextmanager
    def _stand_in(self) -> Iterator[None]:
        """`torch.distributed` with this world in its place."""
        functions: dict[str, Any] = {
            "send": lambda tensor, dst, *_, **__: self._post(dst, True, tensor).wait(),
            "recv": lambda tensor, src, *_, **__: self._post(src, False, tensor).wait(),
            "isend": lambda tensor, dst, *_, **__: self._post(dst, True, tensor),
            "irecv": lambda tensor, src, *_, **__: self._post(src, False, tensor),
            "barrier": lambda *_, **__: self._barrier(),
            "get_rank": lambda *_: self._here.rank,
            "get_world_size": lambda *_: self.size,
        }
        with mock.patch.multiple(dist, **functions):
            yield

    def _post(self, peer: int, is_send: bool, tensor: Tensor) -> Message:
        """Begin to send or receive; if the other end has begun, too, the message passes over."""
        rank = self._here.rank
        if not 0 <= peer < self.size or peer == rank:
            raise ValueError(f"rank {rank} cannot exchange a message with rank {peer} in a world of {self.size}")
        with self._lock:
            own = Message(self, rank, peer, is_send, tensor, self.seconds[rank])
            others = self._unmatched[peer, rank, not is_send]
            if others:
                self._pass_over(own, others.popleft())
            else:
                self._unmatched[rank, peer, is_send].append(own)
            return own

    def _pass_over(self, own: Message, other: Message) -> None:
        send, receive = (own, other) if own.is_send else (other, own)
        if send.tensor.nbytes != receive.tensor.nbytes:
            raise ValueError(
                f"rank {send.rank} sends {send.tensor.nbytes} bytes and rank {receive.rank} receives "
                f"{receive.tensor.nbytes}"
            )
        receive.tensor.copy_(send.tensor.detach().clone())
        link = self._links.get((send.rank, receive.rank), self._link)
        done = max(send.ready_seconds, receive.ready_seconds) + link.seconds(send.tensor.nbytes)
        send.done_seconds = receive.done_seconds = done
        counts = self.counts[send.rank]
        counts.sends += 1
        counts.sent_bytes += send.tensor.nbytes
        counts.sent_to.append(receive.rank)
        self.counts[receive.rank].receives += 1
        self._changed[other.rank].notify()

    def wait_for(self, message: Message) -> None:
        """Return when both ends of a message have met."""
        rank = message.rank
        with self._lock:
            self._waiting[rank] = message
            if message.done_seconds is None:
                self._check_for_deadlock()
            while message.done_seconds is None:
                self._raise_failure()
                self._changed[rank].wait()
            del self._waiting[rank]
            self.seconds[rank] = max(self.seconds[rank], message.done_seconds)

    def _barrier(self) -> None:
        rank = self._here.rank
        with self._lock:
            self._in_barrier.add(rank)
            if len(self._in_barrier) == self.size:
                self.seconds = [max(self.seconds)] * self.size
                self._in_barrier.clear()
                for condition in self._changed:
                    condition.notify()
                return
            self._waiting[rank] = None
            self._check_for_deadlock()
            while rank in self._in_barrier:
                self._raise_failure()
                self._changed[rank].wait()
            del self._waiting[rank]

    def _check_for_deadlock(self) -> None:
        stuck = [rank for rank, message in self._waiting.items() if message is None or message.done_seconds is None]
        if stuck and len(stuck) == self._running and self._failure is None:
            if all(self._waiting[rank] is None and rank not in self._in_barrier for rank in stuck):
                return  # they are about to leave the barrier
            self._fail(Deadlock(f"deadlock: {self._describe(stuck)}"))

    def _describe(self, stuck: list[int]) -> str:
        """Who waits for whom: the cycle, if there is one."""
        path: list[int] = []
        rank: int | None = stuck[0]
        while rank is not None and rank in stuck and rank not in path:
            path.append(rank)
            message = self._waiting[rank]
            rank = message.peer if message is not None else None
        cycle = path[path.index(rank) :] if rank in path else stuck
        sentences = []
        for waiting in cycle:
            message = self._waiting[waiting]
            sentences.append(f"rank {waiting} waits {message if message is not None else 'in the barrier'}")
        return "; ".join(sentences)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        for condition in self._changed:
            condition.notify()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise Deadlock("another rank failed") from self._failure
