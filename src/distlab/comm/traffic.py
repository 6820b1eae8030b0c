"""The one door for training traffic.

Whatever the ranks tell each other while they train goes through `traffic`: it counts messages and bytes by kind
(gradients, weights, loss, …), gives every wait a name and a deadline, and moves a CUDA tensor through pinned host
memory where the backend is gloo. Bytes are what a bandwidth-optimal algorithm sends from this rank (a ring for
all-reduce, all-gather and reduce-scatter: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009).
"""

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.recorder import MESSAGE, WAIT, recorder
from distlab.comm.waits import Wait, group_key


class TrafficError(RuntimeError):
    """A wait for other ranks that failed.

    Attributes:
        lost_a_peer: they ended; otherwise they did not answer within the deadline.
        wait: what was waited for; None where the lab does not know it.
    """

    def __init__(self, sentence: str, cause: Exception, wait: Wait | None = None) -> None:
        super().__init__(sentence)
        self.lost_a_peer = is_lost_peer(cause)
        self.wait = wait


@dataclass
class Ledger:
    """What this rank has sent and how long it has waited.

    Attributes:
        sent_bytes: by kind.
        messages: number of collectives and messages started, by kind.
        waited_seconds: time spent in `Transfer.wait`.
    """

    sent_bytes: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    waited_seconds: float = 0.0


class Background:
    """A collective by hand that runs in a thread, with the part of `dist.Work` that a `Transfer` needs.

    It ends by itself when a rank does not answer: each of its messages has the process group's deadline.
    """

    def __init__(self, ended: Future[None]) -> None:
        self._ended = ended

    def wait(self, _: timedelta) -> None:
        self._ended.result()


class Transfer:
    """A message or collective under way. The tensor is its own again after `wait`."""

    def __init__(
        self,
        door: "Traffic",
        wait: Wait,
        work: dist.Work | Background | None,
        tensor: Tensor,
        staged: "Tensor | None" = None,
    ) -> None:
        self._door, self._work, self._tensor, self._staged = door, work, tensor, staged
        self.waits_for = wait
        self._started = time.perf_counter()

    def wait(self) -> None:
        """Return when the tensor holds the result, or has been sent.

        Raises:
            TrafficError: "rank 1 waited 120 s for …", after `Traffic.timeout_seconds` or when a peer has gone.
        """
        if self._work is None:
            return
        started = time.perf_counter()
        try:
            with self._door.named(self.waits_for):
                self._work.wait(timedelta(seconds=self._door.timeout_seconds))
        finally:
            self._door.ledger.waited_seconds += time.perf_counter() - started
        if self._staged is not None:
            self._tensor.copy_(self._staged, non_blocking=True)
        if recorder.enabled:
            name = self.waits_for.sentence(self._door.describe)
            recorder.add(WAIT, name, started)
            if self.waits_for.way != "send":  # whose completion tells nothing of its arrival
                recorder.add(MESSAGE, name, self._started)
        self._work = None

    def future(self, is_waited_for: bool = False) -> "torch.futures.Future[Tensor]":
        """The tensor once it holds the result, for callers that wait themselves.

        Args:
            is_waited_for: nothing is left to compute meanwhile, so the ledger counts the time until then as waiting.
        """

        def finish(ended: "torch.futures.Future[object]") -> Tensor:
            ended.value()  # raises if it has failed; the door then still waits for it
            self._door.left_to_others.pop(id(self), None)
            name = self.waits_for.sentence(self._door.describe)
            if is_waited_for:
                self._door.ledger.waited_seconds += time.perf_counter() - self._started
                recorder.add(WAIT, name, self._started)
            recorder.add(MESSAGE, name, self._started)
            if self._staged is not None:
                self._tensor.copy_(self._staged)
            return self._tensor

        if self._work is None:
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(self._tensor)
            return done
        assert not isinstance(self._work, Background), "what is made by hand is waited for with wait()"
        self._door.left_to_others[id(self)] = (self.waits_for, self._started)
        return self._work.get_future().then(finish)


class Traffic:
    """Messages and collectives with a ledger, names and deadlines, over `torch.distributed`'s process group.

    Without a process group, or in a world of one, there is nobody to talk to: every collective is complete at once and
    counts nothing.

    Attributes:
        ledger: what has been sent so far.
        timeout_seconds: the deadline of every wait.
        describe: what a rank is called in messages, e.g. "rank 4 (stage 1 of replica 1)".
        begun: how many collectives this rank has begun, by their ranks ("0,1,2").
        left_to_others: what a library waits for, with the moment from which on, oldest first.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.timeout_seconds = 120.0
        self.describe: Callable[[int], str] = "rank {}".format
        self.begun: Counter[str] = Counter()
        self.left_to_others: dict[int, tuple[Wait, float]] = {}
        self._waiting: tuple[Wait, float] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._counted_as: str | None = None

    def all_reduce(
        self,
        tensor: Tensor,
        what: str,
        *,
        kind: str,
        op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.AVG,
        group: "dist.ProcessGroup | None" = None,
        by_hand: "Callable[[Tensor, dist.ReduceOp.RedOpType], None] | None" = None,
    ) -> Transfer:
        """Start to combine `tensor` (any shape, contiguous, changed in place) over all ranks; by default, average it.

        Args:
            tensor: this rank's part; the result on every rank after `Transfer.wait`.
            what: name for a wait's error message, e.g. "the gradients of bucket 2".
            kind: the ledger's column.
            op: how to combine.
            group: the ranks that take part; by default, all.
            by_hand: one of `distlab.collectives.ALL_REDUCES`, over all ranks, instead of the library's; the ledger then
                has the bytes that it really sends from this rank.
        """
        ranks = members(group)
        size = len(ranks)
        if size == 1:
            return Transfer(self, Wait(what, "collective"), None, tensor)
        staged = self._stage(tensor)
        carried = tensor if staged is None else staged
        wait = self._begin(what, ranks)
        if by_hand is not None:
            if group is not None:
                raise ValueError("the collectives by hand are for all ranks, not for a group of them")
            return Transfer(self, wait, self._in_background(lambda: by_hand(carried, op), kind), tensor, staged)
        self._count(kind, 2 * (size - 1) * tensor.nbytes // size)
        with self.named(wait):
            work = dist.all_reduce(carried, op=op, group=group, async_op=True)
        return Transfer(self, wait, work, tensor, staged)

    def all_gather(
        self, parts: Tensor, own: Tensor, what: str, *, kind: str, group: "dist.ProcessGroup | None" = None
    ) -> Transfer:
        """Start to collect every rank's `own` (any shape, contiguous) in `parts` (ranks, *own.shape), contiguous.

        Until `Transfer.wait` has returned neither may change.
        """

        def start(to: Tensor, carried: Tensor) -> dist.Work | None:
            return dist.all_gather(list(to.unbind()), carried, group=group, async_op=True)

        return self._pass_round(parts, own, start, what, kind, group)

    def reduce_scatter(
        self, own: Tensor, parts: Tensor, what: str, *, kind: str, group: "dist.ProcessGroup | None" = None
    ) -> Transfer:
        """Start to add up all ranks' `parts` (ranks, *own.shape), contiguous; a group's r-th rank gets row r in `own`.

        Until `Transfer.wait` has returned neither may change.
        """

        def start(to: Tensor, carried: Tensor) -> dist.Work | None:
            return dist.reduce_scatter(to, list(carried.unbind()), group=group, async_op=True)

        return self._pass_round(own, parts, start, what, kind, group)

    def broadcast(self, tensor: Tensor, what: str, *, kind: str, src: int = 0) -> Transfer:
        """Start to copy rank `src`'s `tensor` (any shape, contiguous) into every rank's."""
        if world_size() == 1:
            return Transfer(self, Wait(what, "collective"), None, tensor)
        self._count(kind, tensor.nbytes if dist.get_rank() == src else 0)
        staged = self._stage(tensor)
        wait = self._begin(f"{what} of {self.describe(src)}", members(None))
        with self.named(wait):
            work = dist.broadcast(tensor if staged is None else staged, src=src, async_op=True)
        return Transfer(self, wait, work, tensor, staged)

    def send(
        self, tensor: Tensor, what: str, *, to: int, kind: str, group: "dist.ProcessGroup | None" = None
    ) -> Transfer:
        """Start to send `tensor` (any shape, contiguous) to another rank.

        Until `Transfer.wait` has returned the tensor must not change, and the transfer must not be dropped: gloo then
        drops the message. Messages between two ranks arrive in the order in which they were sent.

        Args:
            tensor: what to send.
            what: name for a wait's error message, e.g. "the activations of micro-batch 2".
            to: the rank that receives it.
            kind: the ledger's column.
            group: the channel; NCCL carries out one channel's messages in turn, in both directions together.
        """
        self._count(kind, tensor.nbytes)
        staged = self._stage(tensor)
        wait = Wait(what, "send", (to,))
        with self.named(wait):
            work = dist.isend(tensor if staged is None else staged, dst=to, group=group)
        return Transfer(self, wait, work, tensor)

    def receive(self, tensor: Tensor, what: str, *, source: int, group: "dist.ProcessGroup | None" = None) -> Transfer:
        """Start to receive into `tensor` (any shape, contiguous) what rank `source` sends next in `group`."""
        staged = _host_space(tensor)
        wait = Wait(what, "receive", (source,))
        with self.named(wait):
            work = dist.irecv(tensor if staged is None else staged, src=source, group=group)
        return Transfer(self, wait, work, tensor, staged)

    @contextlib.contextmanager
    def named(self, name: str | Wait) -> Iterator[None]:
        """Turn what goes wrong inside into a `TrafficError` that says who waited how long for `name`.

        `waits_for` answers with it meanwhile. An error that is not about other ranks is let through as it is.
        """
        wait = name if isinstance(name, Wait) else Wait(name, "other", tuple(r for r in members(None) if r != rank()))
        started = time.perf_counter()
        outer, self._waiting = self._waiting, (wait, started)
        try:
            yield
        except TrafficError:
            raise  # of a wait inside this one, which knows more
        except RuntimeError as error:
            if is_lost_peer(error) or is_timeout(error):
                raise self._failed(wait, started, error) from error
            raise
        finally:
            self._waiting = outer

    def waits_for(self, at_least_seconds: float = 0.0) -> Wait | None:
        """What this rank has been waiting for, itself or through a library; None if not for so long."""
        under_way = self._waiting or next(iter(list(self.left_to_others.values())), None)
        if under_way is None or time.perf_counter() - under_way[1] < at_least_seconds:
            return None
        return under_way[0]

    def failure_of(self, error: Exception) -> TrafficError | None:
        """What a library raised, as the failure of the wait that was left to it; None if it was no such failure."""
        if is_lost_peer(error) and not self.left_to_others:
            return TrafficError(f"{self.describe(rank())} lost its connection: {reason(error)}", error)
        of_a_wait = isinstance(error, RuntimeError) and (is_lost_peer(error) or is_timeout(error))
        if not of_a_wait or not self.left_to_others:
            return None
        return self._failed(*next(iter(self.left_to_others.values())), error)

    def _failed(self, wait: Wait, started: float, error: Exception) -> TrafficError:
        seconds = time.perf_counter() - started
        name = wait.sentence(self.describe)
        return TrafficError(f"{self.describe(rank())} waited {seconds:.1f} s for {name}: {reason(error)}", error, wait)

    @contextlib.contextmanager
    def counted_as(self, kind: str) -> Iterator[None]:
        """Put all that is sent meanwhile in this one column of the ledger, whatever it is."""
        self._counted_as = kind
        try:
            yield
        finally:
            self._counted_as = None

    def _pass_round(
        self,
        result: Tensor,
        tensor: Tensor,
        start: "Callable[[Tensor, Tensor], dist.Work | None]",
        what: str,
        kind: str,
        group: "dist.ProcessGroup | None",
    ) -> Transfer:
        """Start a collective in which a part for, or of, each other rank goes round a ring.

        One of `tensor`, which it takes, and `result`, which it fills, is such a part; the other has one of each rank.
        """
        ranks = members(group)
        if len(ranks) == 1:
            result.copy_(tensor.view_as(result))
            return Transfer(self, Wait(what, "collective"), None, result)
        self._count(kind, (len(ranks) - 1) * min(tensor.nbytes, result.nbytes))
        carried, staged = self._stage(tensor), _host_space(result)
        wait = self._begin(what, ranks)
        with self.named(wait):
            work = start(result if staged is None else staged, tensor if carried is None else carried)
        return Transfer(self, wait, work, result, staged)

    def _begin(self, what: str, ranks: Sequence[int]) -> Wait:
        """Count a collective of `ranks`, and name the wait for it."""
        key = group_key(ranks)
        self.begun[key] += 1
        return Wait(what, "collective", tuple(r for r in ranks if r != rank()), self.begun[key] - 1)

    def _in_background(self, collective: Callable[[], None], kind: str) -> Background:
        """Run a collective made of sends and receives, after those before it, while this thread goes on."""

        def counted() -> None:
            with counting_sends() as sent_bytes:
                collective()
            self._count(kind, sum(sent_bytes))

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1)
        return Background(self._thread.submit(counted))

    def _count(self, kind: str, sent_bytes: int) -> None:
        kind = self._counted_as or kind
        self.ledger.sent_bytes[kind] += sent_bytes
        self.ledger.messages[kind] += 1

    def _stage(self, tensor: Tensor) -> Tensor | None:
        """A pinned host copy of a CUDA tensor that gloo shall send; None where the tensor itself can travel."""
        staged = _host_space(tensor)
        if staged is not None:
            staged.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()
        return staged


def _host_space(tensor: Tensor) -> Tensor | None:
    """Pinned host memory for the contents of a CUDA tensor under gloo; None where the tensor itself can travel."""
    if not tensor.is_cuda or dist.get_backend() == "nccl":
        return None
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


@contextlib.contextmanager
def counting_sends() -> Iterator[list[int]]:
    """The sizes in bytes of what this thread sends meanwhile to single ranks, however it does."""
    sent_bytes: list[int] = []
    thread = threading.get_ident()

    send = dist.ProcessGroup.send  # where `dist.send` and `dist.isend` end, too

    def count(group: dist.ProcessGroup, tensors: list[Tensor], *args: Any) -> Any:
        if threading.get_ident() == thread:
            sent_bytes.extend(tensor.nbytes for tensor in tensors)
        return send(group, tensors, *args)

    with mock.patch.object(dist.ProcessGroup, "send", count):
        yield sent_bytes


def world_size() -> int:
    """Ranks in the process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def members(group: "dist.ProcessGroup | None") -> Sequence[int]:
    """The ranks of a process group; of all by default, and rank 0 alone without one."""
    return range(world_size()) if group is None else dist.get_process_group_ranks(group)


def reason(error: Exception) -> str:
    """What gloo's or NCCL's error says, in a few words."""
    if is_lost_peer(error):
        return "a rank has ended and closed its connection"
    if is_timeout(error):
        return "no answer (--timeout sets how long to wait)"
    return (str(error).splitlines() or [type(error).__name__])[0]


def is_timeout(error: Exception) -> bool:
    """Whether an error says that a wait took longer than its deadline."""
    return re.search(r"timed? ?out", str(error), re.IGNORECASE) is not None


def is_lost_peer(error: Exception) -> bool:
    """Whether an error says that another rank is gone."""
    signs = (
        r"closed by peer|reset by peer|broken pipe|socket closed|connection.*(closed|refused)|no route to host|"
        r"unreachable|ncclRemoteError|remote process"
    )
    return isinstance(error, RuntimeError) and re.search(signs, str(error), re.IGNORECASE) is not None


traffic = Traffic()
