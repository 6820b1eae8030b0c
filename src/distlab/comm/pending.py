"""A message or collective under way: one type, whatever carries it."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.context import ENVIRONMENT, Context, Operation
from distlab.comm.recorder import MESSAGE, WAIT
from distlab.comm.waits import StreamWait, Wait, is_timeout
from distlab.machine.streams import passed
from distlab.machine.time_limits import within
from distlab.machine.torch_patches import call_after_backward_pass, uncompiled

SECONDS_BETWEEN_CHECKS = 1.0  # during a wait over gloo


class SharedWork(ABC):
    """A started operation in shared memory, performed by the thread that waits for it."""

    named: Wait | None = None  # its name, if it has one

    def wait(self, timeout: timedelta) -> None:
        """Complete it; `RuntimeError` at the deadline, or if another rank has exited."""
        self.advance(time.perf_counter() + timeout.total_seconds())

    @abstractmethod
    def advance(self, deadline: float) -> None:
        """Do the remaining work, or, with the deadline 0.0, as much as needs no wait; `RuntimeError` as in `wait`."""


Carrier = dist.Work | Future[None] | SharedWork


@uncompiled
class Pending(Operation):
    """A message or collective under way. The caller may use its tensors again after `wait`.

    Keep it until then: gloo drops the message of a handle that is garbage-collected.

    Args:
        context: the state that the groups of this rank share.
        wait: its name.
        carrier: torch's handle, work in shared memory, or a thread; None if it is complete already.
        tensors: the tensors that it sends or fills.

    Attributes:
        is_on_stream: whether the stream waits for it, and not the thread.
    """

    def __init__(self, context: Context, wait: Wait, carrier: Carrier | None, tensors: list[Tensor]) -> None:
        super().__init__(tensors)
        self._context, self._wait, self._carrier = context, wait, carrier
        self._was_waited_for = False
        self._started = time.perf_counter()
        # Over NCCL; gloo carries host memory.
        self.is_on_stream = isinstance(carrier, dist.Work) and tensors[0].is_cuda and context.is_over_nccl
        if self.is_on_stream:
            self._posted = passed()
        for observe in context.observers:
            observe(self)

    @property
    def name(self) -> Wait:
        """Its name, and the ranks that take part."""
        return self._wait

    def wait(self, timeout: timedelta = ENVIRONMENT) -> bool:
        """Wait until the tensors hold the result or have been sent; over NCCL, only the stream waits for that.

        Args:
            timeout: replaces the group's deadline.

        Raises:
            TrafficError: "rank 1 waited 120 s for …", at the deadline or when a peer has exited.
        """
        self.complete(timeout)
        self._was_waited_for = True
        return True

    def complete(self, timeout: timedelta = ENVIRONMENT) -> None:
        """Do the work of `wait`; the caller still has to wait."""
        if self._carrier is not None:
            if self.is_on_stream:
                self._wait_on_stream(self._carrier)
            else:
                self._wait_on_host(self._carrier, timeout)
            self._carrier = None
        super().wait()

    def follow(self) -> None:
        """Make the current stream wait for it over NCCL, a side stream, whose waits do not count as this rank's."""
        assert isinstance(self._carrier, dist.Work)
        self._carrier.wait()
        self._carrier, self._was_waited_for = None, True

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which this thread waits for such a side stream; the watch then names the wait."""
        return self._context.waits.during(self._wait)

    def was_waited_for(self) -> bool:
        """Return whether `wait` has been called, which is needed even if there was nothing left to wait for."""
        return self._was_waited_for

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, at once.

        In shared memory, this rank's thread does as much of its part as it can without waiting for others. gloo does
        not report this for a message.
        """
        if isinstance(self._carrier, SharedWork):
            try:
                self._carrier.advance(deadline=0.0)
            except RuntimeError as error:
                return not is_timeout(error)
            return True
        if isinstance(self._carrier, Future):
            return self._carrier.done()
        return self._carrier is None or self._carrier.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """Return a future of the tensors, for torch's DDP and others that wait themselves.

        On the CPU, it is completed at the end of the backward pass that runs. So ranks need not reach each bucket of
        DDP's at the same time, and a callback may wait for further collectives: in the threads of gloo, of which there
        are two, it would keep these waiting. Outside of a pass, work that the waiting thread performs is performed now.
        """
        tensors = self._tensors
        is_on_gpu = bool(tensors) and tensors[0].is_cuda
        if not (isinstance(self._carrier, dist.Work) and is_on_gpu):
            late = _Late(self)
            if not self.was_waited_for() and call_after_backward_pass(late.complete):
                return late
            if not isinstance(self._carrier, dist.Work):
                late.complete()
                return late
        future: torch.futures.Future[list[Tensor]]
        future = torch.futures.Future(devices=[tensors[0].device] if is_on_gpu else None)
        ended = self._carrier.get_future()
        waits = self._context.waits

        def finish(_: "torch.futures.Future[list[Tensor]]") -> list[Tensor]:
            ended.value()  # raises if it has failed; it then stays in `waits.in_libraries`
            waits.in_libraries.pop(id(self), None)
            if self.is_on_stream:
                self._ended_on_stream(self._posted)
            else:
                self._ended_on_host(None)
            self._carrier = None
            self.wait()
            return tensors

        waits.in_libraries[id(self)] = (self._wait, self._started)
        ended.add_done_callback(lambda _: future.set_result(tensors))
        return future.then(finish)

    def _wait_on_host(self, carrier: Carrier, timeout: timedelta) -> None:
        waits, started = self._context.waits, time.perf_counter()
        check = self._context.options.check
        limit = timeout if timeout > ENVIRONMENT else timedelta(seconds=waits.timeout_seconds)
        try:
            with waits.during(self._wait):
                if isinstance(carrier, Future):
                    carrier.result()  # each of its messages has the group's deadline
                elif check is not None and isinstance(carrier, dist.Work) and not carrier.is_completed():
                    # gloo may not notice that another rank has left: see `shut_down`, and a message half received.
                    within(math.inf, partial(carrier.wait, limit), check, SECONDS_BETWEEN_CHECKS).result()
                else:
                    carrier.wait(limit)
        finally:
            self._context.ledger.waited(time.perf_counter() - started, self._wait.way == "collective")
        self._ended_on_host(started)

    def _wait_on_stream(self, carrier: Carrier) -> None:
        """Make the work that follows on the current stream wait for `carrier`."""
        assert isinstance(carrier, dist.Work)
        reached = passed()
        with self._context.waits.during(self._wait):
            carrier.wait()  # with a deadline, it would keep this thread until the message is there
        self._ended_on_stream(reached)

    def _ended_on_host(self, waited_from: float | None) -> None:
        """Record the completion and, if this thread waited for it, the wait from `waited_from`."""
        recorder = self._context.recorder
        if not recorder.enabled:
            return
        name = self._wait.sentence(self._context.describe)
        if waited_from is not None:
            recorder.add(WAIT, name, waited_from, self._wait.flow)
        if self._wait.way != "send":  # the completion of a send does not mean that the message has arrived
            recorder.add(MESSAGE, name, self._started)

    def _ended_on_stream(self, reached: torch.cuda.Event) -> None:
        """Record the completion on the stream, and its wait from `reached`."""
        recorder, done = self._context.recorder, passed()
        name = self._wait.sentence(self._context.describe) if recorder.enabled else ""
        self._context.waits.of_stream.add(StreamWait(self._wait, reached, done))
        self._context.waits.waited_so_far()  # a program without steps would otherwise keep the events of all its waits
        recorder.add_on_stream(WAIT, name, reached, done)
        if self._wait.way != "send":
            recorder.add_on_stream(MESSAGE, name, self._posted, done)


@uncompiled
class _Late(torch.futures.Future[Any]):
    """A future that is completed at the end of the backward pass, or when Python code waits for it before.

    So are those that its `then` returns.
    """

    def __init__(self, before: "Pending | _Late") -> None:
        super().__init__()
        self._before = before
        self._following: list[tuple[Callable[[Any], Any], _Late]] = []

    def complete(self) -> None:
        if not self.done():
            self._before.wait()
            if isinstance(self._before, Pending):
                self._set(self._before.result())

    def wait(self) -> Any:
        self.complete()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> "torch.futures.Future[Any]":
        if self.done():
            return super().then(callback)
        following = _Late(self)
        self._following.append((callback, following))
        return following

    def _set(self, result: object) -> None:
        self.set_result(result)
        while self._following:
            callback, following = self._following.pop(0)
            following._set(callback(self))
