"""A world simulated in one process: ranks are threads, messages are copies, and time is computed, not measured.

Each rank has an endpoint. A message takes latency + size / bandwidth on a virtual clock, which gives the cost of an
algorithm for more ranks than there are machines (the postal model; Hockney, "The communication challenge for MPP",
1994).
"""

import math
import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from distlab.comm.link import Link
from distlab.comm.wait_graph import find_cycle


class Deadlock(RuntimeError):
    """All ranks wait, and none can continue."""


class HalfMessage(RuntimeError):
    """All ranks finished, but a message did not: its other end was never started, or no rank waited for it."""


@dataclass(eq=False)
class Message:
    """A send or a receive that a rank has started; it matches only one with the same tag."""

    world: "SimulatedWorld"
    rank: int
    peer: int
    is_send: bool
    tensor: Tensor
    tag: int
    is_done: bool = False

    def wait(self, *_: object) -> None:
        """Return when the message has arrived."""
        if not self.is_done:
            self.world.wait(self.rank, self)

    def __str__(self) -> str:
        return f"{'to send to' if self.is_send else 'for a message from'} {self.other_end}"

    @property
    def other_end(self) -> str:
        return f"rank {self.peer} with tag {self.tag}" if self.tag else f"rank {self.peer}"


@dataclass(eq=False)
class Transit:
    """A message in transit: both its send and its receive have started."""

    send: Message
    receive: Message
    bytes_per_second: float
    started_seconds: float  # when the later of the two started
    flows_from_seconds: float  # when its bytes start to arrive
    left_bytes: float  # bytes that have not arrived yet


class Passed(NamedTuple):
    """A message that has arrived."""

    sender: int
    receiver: int
    size_bytes: int
    started_seconds: float
    ended_seconds: float


@dataclass
class Counts:
    """The number and bytes of messages that one rank has sent and received, and the ranks that it sent to, in order."""

    sends: int = 0
    receives: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_to: list[int] = field(default_factory=list)


@dataclass(eq=False)
class SimulatedWorld:
    """`size` ranks that run the same function, each in a separate thread.

    A send returns when its receiver has received the message: the strictest behavior that `torch.distributed` allows.
    One thread runs at a time, until it waits. When all threads wait, the clock advances to the next time at which one
    can continue, so the simulated time does not depend on how long the threads take.
    """

    size: int
    link: Link = field(default_factory=Link)  # cost of a message
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)  # exceptions, by (sender, receiver)
    # Total bandwidth if every rank sends a message at the same time, as on one computer; fewer messages slow each other
    # down less. If it is finite, latency counts like bytes, because it also takes time of the shared cores.
    shared_bytes_per_second: float = math.inf
    ranks_at_once: float = math.inf  # ranks that can `compute` at full speed at once; more ranks share that speed
    one_card: bool = False  # a rank's outgoing messages share one link, as do its incoming ones; else one per pair
    keep_messages: bool = False

    def __post_init__(self) -> None:
        self.counts = [Counts() for _ in range(self.size)]
        self.seconds = [0.0] * self.size  # by rank, the virtual time at which it finished
        self.messages: list[Passed] = []  # in order of arrival, if `keep_messages`
        self._clock = 0.0
        self._has_run = False
        self._turns = [threading.Lock() for _ in range(self.size)]  # locked until it is the rank's turn
        self._ready: deque[int] = deque()
        self._waiting: dict[int, Message | None] = {}  # None: in the barrier or computing
        self._unmatched: dict[tuple[int, int, bool, int], deque[Message]] = defaultdict(deque)
        self._flows: list[Transit] = []
        self._computing: dict[int, float] = {}  # by rank, the seconds left at full speed
        self._in_barrier: set[int] = set()
        self._failure: BaseException | None = None

    @property
    def makespan(self) -> float:
        """Seconds until the last rank has finished."""
        return max(self.seconds)

    def run(self, work: Callable[["SimulatedEndpoint"], Any]) -> list[Any]:
        """Run `work` on every rank, with the rank's endpoint, and return the results by rank.

        Raises:
            Deadlock: all ranks wait; the message says which rank waits for which.
            HalfMessage: a rank started a send that no rank received, or a receive for which no rank sent.
            Exception: the exception of the first rank that failed.
        """
        if self._has_run:
            raise RuntimeError("a simulated world runs once; make another one")
        self._has_run = True
        results: list[Any] = [None] * self.size

        def run_rank(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                results[rank] = work(SimulatedEndpoint(self, rank))
            except BaseException as error:
                self._fail(error)
            self.seconds[rank] = self._clock
            self._hand_over()

        for turn in self._turns:
            turn.acquire()
        usual = threading.stack_size(512 * 1024)  # a thousand ranks fit
        try:
            ranks = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(self.size)]
            with _one_core():
                for thread in ranks:
                    thread.start()
            self._ready.extend(range(self.size))
            self._hand_over()
            for thread in ranks:
                thread.join()
        finally:
            threading.stack_size(usual)
        if self._failure is not None:
            raise self._failure
        for message in (message for begun in self._unmatched.values() for message in begun):
            began, never = ("to send to", "received it") if message.is_send else ("to receive from", "sent anything")
            raise HalfMessage(f"rank {message.rank} began {began} {message.other_end}, which never {never}")
        for flow in self._flows:
            raise HalfMessage(f"a message from rank {flow.send.rank} to rank {flow.receive.rank} was not waited for")
        return results

    def begin(self, own: Message) -> Message:
        """Start a send or receive; if its other end has already started, the message is now in transit."""
        rank, peer, is_send, tag = own.rank, own.peer, own.is_send, own.tag
        if not 0 <= peer < self.size or peer == rank:
            raise ValueError(f"rank {rank} cannot exchange a message with rank {peer} in a world of {self.size}")
        if not own.tensor.is_contiguous():
            raise ValueError(f"rank {rank} gives a tensor that is not contiguous; messages must be")
        if others := self._unmatched[peer, rank, not is_send, tag]:
            self._set_out(*((own, others.popleft()) if is_send else (others.popleft(), own)))
        else:
            self._unmatched[rank, peer, is_send, tag].append(own)
        return own

    def _set_out(self, send: Message, receive: Message) -> None:
        size_bytes, received_bytes = send.tensor.nbytes, receive.tensor.nbytes
        if (send.tensor.dtype, size_bytes) != (receive.tensor.dtype, received_bytes):
            sent = f"rank {send.rank} sends {size_bytes} bytes of {send.tensor.dtype}"
            raise ValueError(f"{sent} and rank {receive.rank} receives {received_bytes} of {receive.tensor.dtype}")
        link = self.links.get((send.rank, receive.rank), self.link)
        flows_from, left_bytes = self._clock + link.latency_seconds, float(size_bytes)
        if math.isfinite(self.shared_bytes_per_second):
            bytes_per_second = min(link.bytes_per_second, self.shared_bytes_per_second)
            flows_from, left_bytes = self._clock, size_bytes + link.latency_seconds * bytes_per_second
        self._flows.append(Transit(send, receive, link.bytes_per_second, self._clock, flows_from, left_bytes))
        sender, receiver = self.counts[send.rank], self.counts[receive.rank]
        sender.sends += 1
        sender.sent_bytes += size_bytes
        sender.sent_to.append(receive.rank)
        receiver.receives += 1
        receiver.received_bytes += size_bytes

    def compute(self, rank: int, seconds: float) -> None:
        """Advance a rank's time by its own work, which takes `seconds` at full speed."""
        if seconds > 0:
            self._computing[rank] = seconds
            self.wait(rank, None)

    def barrier(self, rank: int) -> None:
        """Wait for all ranks."""
        self._in_barrier.add(rank)
        if len(self._in_barrier) < self.size:
            self.wait(rank, None)
            return
        for other in self._in_barrier - {rank}:
            self._release(other)
        self._in_barrier.clear()

    def wait(self, rank: int, message: Message | None) -> None:
        """Let other ranks run until this one is released and it is its turn."""
        self._waiting[rank] = message
        self._hand_over()
        self._turns[rank].acquire()
        if self._failure is not None:
            raise Deadlock("another rank failed") from self._failure

    def _release(self, rank: int) -> None:
        del self._waiting[rank]
        self._ready.append(rank)

    def _hand_over(self) -> None:
        """Give the turn to the next rank that can continue."""
        while self._waiting and not self._ready:
            self._advance_clock()
        if self._ready:
            self._turns[self._ready.popleft()].release()

    def _advance_clock(self) -> None:
        """Set the clock to the next time at which a message or computation starts or ends."""
        if not self._flows and not self._computing:
            self._fail(Deadlock(f"deadlock: {self._who_waits()}"))
            return
        flowing = [flow for flow in self._flows if flow.flows_from_seconds <= self._clock]
        rates = self._rates(flowing)
        ends = [self._clock + flow.left_bytes / rate for flow, rate in zip(flowing, rates, strict=True)]
        starts = [flow.flows_from_seconds for flow in self._flows if flow.flows_from_seconds > self._clock]
        speed = min(1, self.ranks_at_once / max(1, len(self._computing)))
        finishes = {rank: self._clock + left / speed for rank, left in self._computing.items()}
        now = min([*ends, *starts, *finishes.values()])
        passed, self._clock = now - self._clock, now
        for flow, rate, end in zip(flowing, rates, ends, strict=True):
            if math.isclose(end, now, rel_tol=1e-12):
                self._arrive(flow)
            else:
                flow.left_bytes -= rate * passed
        for rank, finish in finishes.items():
            self._computing[rank] -= speed * passed
            if math.isclose(finish, now, rel_tol=1e-12):
                del self._computing[rank]
                self._release(rank)

    def _rates(self, flowing: list[Transit]) -> list[float]:
        """Return the bytes per second of each message; simultaneous ones share links and the total bandwidth."""
        ends = [(flow.send.rank, flow.receive.rank) for flow in flowing]
        pairs, out, into = Counter(ends), Counter(sender for sender, _ in ends), Counter(to for _, to in ends)
        rates = []
        for flow, (sender, receiver) in zip(flowing, ends, strict=True):
            on_link = max(out[sender], into[receiver]) if self.one_card else pairs[sender, receiver]
            rate = flow.bytes_per_second / on_link
            if math.isfinite(self.shared_bytes_per_second):  # time per byte: linear from one message to one per rank
                alone = 1 / min(flow.bytes_per_second, self.shared_bytes_per_second)
                of_each_rank = max(alone, self.size / self.shared_bytes_per_second)
                rate = min(rate, 1 / (alone + (len(flowing) - 1) / (self.size - 1) * (of_each_rank - alone)))
            rates.append(rate)
        return rates

    def _arrive(self, flow: Transit) -> None:
        """Deliver a message; ranks that wait for it continue."""
        self._flows.remove(flow)
        sent, received = flow.send.tensor.detach(), flow.receive.tensor.detach()
        if self.keep_messages:
            ends = flow.send.rank, flow.receive.rank
            self.messages.append(Passed(*ends, sent.nbytes, flow.started_seconds, self._clock))
        if not received.is_meta:
            received.view(-1).copy_(sent.view(-1))
        for message in (flow.send, flow.receive):
            message.is_done = True
            if self._waiting.get(message.rank) is message:
                self._release(message.rank)

    def _who_waits(self) -> str:
        """Return in words the wait of each rank of a cycle; without a cycle, the wait of every waiting rank."""
        not_in_barrier = [rank for rank in range(self.size) if rank not in self._in_barrier]
        edges = {rank: not_in_barrier if wait is None else [wait.peer] for rank, wait in self._waiting.items()}
        stuck = find_cycle(edges) or list(self._waiting)
        return "; ".join(f"rank {rank} waits {self._waiting[rank] or 'in the barrier'}" for rank in stuck)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        for rank in list(self._waiting):
            self._release(rank)


class SimulatedEndpoint:
    """One rank's access to a simulated world: an `Endpoint` whose `compute` spends time on the rank's own work."""

    def __init__(self, world: SimulatedWorld, rank: int) -> None:
        self._world, self._rank = world, rank
        self.barrier, self.compute = partial(world.barrier, rank), partial(world.compute, rank)

    def get_rank(self) -> int:
        return self._rank

    def get_world_size(self) -> int:
        return self._world.size

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> None:
        self.irecv(tensor, src, tag).wait()

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Message:
        return self._world.begin(Message(self._world, self._rank, dst, True, tensor, tag))

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Message:
        return self._world.begin(Message(self._world, self._rank, src, False, tensor, tag))


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep threads started inside on one core, where threads that take turns switch twice as fast."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(usual)[os.getpid() % len(usual)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)
