"""A message or collective in progress, and the host buffers through which gloo sends CUDA tensors."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.endpoint import is_over_nccl
from distlab.comm.recorder import MESSAGE, WAIT, recorder
from distlab.comm.shared import SharedCollective, SharedWork
from distlab.comm.streams import passed
from distlab.comm.waits import NamedWaits, StreamWait, Wait

Work = dist.Work | Future[None] | SharedWork


class Transfer:
    """A message or collective in progress. The caller may use the tensor again after `wait`.

    `work` is torch's handle, the thread of a handwritten collective, or work in shared memory; None if there is
    nothing to wait for. It sends or fills `carried`, which is `tensor` itself or its `host_buffer`. `finish` makes
    the content of `carried` from what `work` has brought.
    """

    def __init__(
        self,
        waits: NamedWaits,
        wait: Wait,
        work: Work | None,
        tensor: Tensor,
        carried: Tensor,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._waits, self._wait, self._work, self._tensor, self._carried = waits, wait, work, tensor, carried
        self._finish = finish
        self._started = time.perf_counter()
        self._is_on_stream = work is not None and not carried.is_cpu  # over NCCL: gloo carries host memory
        if self._is_on_stream:
            self._posted = passed()

    def wait(self) -> None:
        """Wait until the tensor holds the result or has been sent; over NCCL, only the stream waits for that.

        Raises:
            TrafficError: "rank 1 waited 120 s for …", after `Traffic.timeout_seconds` or when a peer has exited.
        """
        if self._work is None:
            return
        if self._is_on_stream:
            self._wait_on_stream(self._work)
            return
        started = time.perf_counter()
        try:
            with self._waits.named(self._wait):
                if isinstance(self._work, Future):
                    self._work.result()  # each of its messages has the process group's deadline
                else:
                    self._work.wait(timedelta(seconds=self._waits.timeout_seconds))
        except Exception:
            self._count_wait(started)
            raise
        self._ended_on_host(started)
        self._finish()
        if self._carried is not self._tensor:
            self._tensor.copy_(self._carried, non_blocking=True)
        self._work = None

    def was_waited_for(self) -> bool:
        """Whether `wait()` has returned."""
        return self._work is None

    def has_arrived(self) -> bool:
        """Whether `wait` would return, or raise, at once; not known over NCCL and in shared memory."""
        if self._is_on_stream or self._work is None or isinstance(self._work, SharedWork):
            return self._work is None
        return self._work.done() if isinstance(self._work, Future) else self._work.is_completed()

    def do_own_share(self) -> None:
        """In shared memory, do what this rank has to do before the transfer can end anywhere; elsewhere, nothing.

        `wait` does it, too. But a rank that has begun several does its share of all before it waits for the others'.

        Raises:
            TrafficError: as `wait`.
        """
        if isinstance(self._work, SharedCollective):
            started = time.perf_counter()
            try:
                with self._waits.named(self._wait):
                    self._work.combine(started + self._waits.timeout_seconds)
            finally:
                self._count_wait(started)
                recorder.add(WAIT, self._wait.sentence(self._waits.describe) if recorder.enabled else "", started)

    def _wait_on_stream(self, work: Work) -> None:
        """Order what follows on the current stream after `work`."""
        assert not isinstance(work, Future | SharedWork), "a collective of another kind goes over gloo"
        reached = passed()
        with self._waits.named(self._wait):
            work.wait()  # with a deadline, it would keep this thread until the message is there
        self._ended_on_stream(reached)
        self._work = None

    def _count_wait(self, started: float) -> None:
        """Add a wait that began at `started`, and ends now, to the ledger."""
        self._waits.ledger.waited(time.perf_counter() - started, self._wait.way == "collective")

    def _ended_on_host(self, waited_from: float | None) -> None:
        """Record the completion and, if this thread waited for it, the wait from `waited_from`."""
        name = self._wait.sentence(self._waits.describe) if recorder.enabled else ""
        if waited_from is not None:
            self._count_wait(waited_from)
            recorder.add(WAIT, name, waited_from)
        if self._wait.way != "send":  # the completion of a send does not mean that the message has arrived
            recorder.add(MESSAGE, name, self._started)

    def _ended_on_stream(self, reached: torch.cuda.Event | None) -> None:
        """Record the completion on the stream and, if the stream waited for it, the wait from `reached`."""
        done, name = passed(), self._wait.sentence(self._waits.describe) if recorder.enabled else ""
        if reached is not None:
            self._waits.stream_waits.add(StreamWait(self._wait, reached, done))
            recorder.add_on_stream(WAIT, name, reached, done)
        if self._wait.way != "send":
            recorder.add_on_stream(MESSAGE, name, self._posted, done)

    def future(self, is_waited_for: bool = False) -> torch.futures.Future[Tensor]:
        """A future of the tensor that completes when it holds the result, for callers that wait themselves.

        `is_waited_for` says that there is nothing left to compute; then the ledger counts the time until completion as
        waiting.
        """

        queued = future_of(self._tensor)
        if self._work is None:
            queued.set_result(self._tensor)
            return queued
        assert not isinstance(self._work, Future | SharedWork), "a collective of another kind has wait() only"
        ended = self._work.get_future()

        def finish(_: "torch.futures.Future[Tensor]") -> Tensor:
            ended.value()  # raises if it has failed; it then stays in `waits_in_libraries`
            self._waits.waits_in_libraries.pop(id(self), None)
            if self._is_on_stream:
                self._ended_on_stream(self._posted if is_waited_for else None)
            else:
                self._ended_on_host(self._started if is_waited_for else None)
                self._finish()
            return self._tensor if self._carried is self._tensor else self._tensor.copy_(self._carried)

        self._waits.waits_in_libraries[id(self)] = (self._wait, self._started)
        ended.add_done_callback(lambda _: queued.set_result(self._tensor))
        return queued.then(finish)


class Pending(Protocol):
    """A transfer, or something else that ends with one. `wait` may be called again when it has ended."""

    def do_own_share(self) -> None: ...
    def wait(self) -> None: ...


def wait_for_all(transfers: Sequence[Pending]) -> None:
    """Wait for several, in their order; `TrafficError` as of `Transfer.wait`."""
    for transfer in transfers:
        transfer.do_own_share()
    for transfer in transfers:
        transfer.wait()


def future_of(tensor: Tensor) -> "torch.futures.Future[Tensor]":
    """A future for a tensor; torch must know in advance if the tensor is on a GPU."""
    return torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)


def host_buffer(tensor: Tensor) -> Tensor:
    """The tensor itself if the backend can send it; for a CUDA tensor over gloo, pinned host memory of its size.

    Raises:
        ValueError: its elements do not lie side by side. gloo would combine what lies there instead.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor {tuple(tensor.shape)} with strides {tensor.stride()}: only contiguous ones are sent"
        )
    if tensor.is_cpu or is_over_nccl():
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def staged(tensor: Tensor) -> Tensor:
    """The tensor, copied to its `host_buffer` if the backend cannot send it directly."""
    carried = host_buffer(tensor)
    if carried is not tensor:
        carried.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
    return carried
