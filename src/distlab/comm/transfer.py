"""A message or collective in progress, and the host memory that carries a CUDA tensor where the backend is gloo."""

import time
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.recorder import MESSAGE, WAIT, recorder
from distlab.comm.waits import NamedWaits, Wait


class Transfer:
    """A message or collective in progress. The tensor is the caller's again after `wait`.

    `work` is torch's handle, or the thread of a collective written by hand; None if there is nothing to wait for. It
    sends or fills `carried`: `tensor` itself or its `host_buffer`.
    """

    def __init__(
        self, waits: NamedWaits, wait: Wait, work: dist.Work | Future[None] | None, tensor: Tensor, carried: Tensor
    ) -> None:
        self._waits, self._wait, self._work, self._tensor, self._carried = waits, wait, work, tensor, carried
        self._started = time.perf_counter()

    def wait(self) -> None:
        """Return when the tensor holds the result, or has been sent.

        Raises:
            TrafficError: "rank 1 waited 120 s for …", after `Traffic.timeout_seconds` or when a peer has exited.
        """
        if self._work is None:
            return
        started = time.perf_counter()
        try:
            with self._waits.named(self._wait):
                if isinstance(self._work, Future):
                    self._work.result()  # each of its messages has the process group's deadline
                else:
                    self._work.wait(timedelta(seconds=self._waits.timeout_seconds))
        finally:
            self._waits.ledger.waited_seconds += time.perf_counter() - started
        if self._carried is not self._tensor:
            self._tensor.copy_(self._carried, non_blocking=True)
        if recorder.enabled:
            name = self._wait.sentence(self._waits.describe)
            recorder.add(WAIT, name, started)
            if self._wait.way != "send":  # whose completion does not show that it has arrived
                recorder.add(MESSAGE, name, self._started)
        self._work = None

    def future(self, is_waited_for: bool = False) -> torch.futures.Future[Tensor]:
        """The tensor once it holds the result, for callers that wait themselves.

        If it `is_waited_for`, nothing is left to compute meanwhile: the ledger counts the time until then as waiting.
        """

        def finish(ended: "torch.futures.Future[object]") -> Tensor:
            ended.value()  # raises if it has failed; then it remains among the library's waits
            self._waits.library_waits.pop(id(self), None)
            name = self._wait.sentence(self._waits.describe)
            if is_waited_for:
                self._waits.ledger.waited_seconds += time.perf_counter() - self._started
                recorder.add(WAIT, name, self._started)
            recorder.add(MESSAGE, name, self._started)
            return self._tensor if self._carried is self._tensor else self._tensor.copy_(self._carried)

        if self._work is None:
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(self._tensor)
            return done
        assert not isinstance(self._work, Future), "a collective written by hand is waited for with wait()"
        self._waits.library_waits[id(self)] = (self._wait, self._started)
        return self._work.get_future().then(finish)


def host_buffer(tensor: Tensor) -> Tensor:
    """Pinned host memory of the size of a CUDA tensor under gloo; where the tensor itself can travel, the tensor."""
    if not tensor.is_cuda or dist.get_backend() == "nccl":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def staged(tensor: Tensor) -> Tensor:
    """The tensor's content where the backend can send it from."""
    carried = host_buffer(tensor)
    if carried is not tensor:
        carried.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
    return carried
