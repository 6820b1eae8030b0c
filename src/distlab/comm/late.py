"""A number that the ranks add up while they go on, and that the host reads later."""

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class LateNumber:
    """A scalar, or parts of it, and the sum over the ranks that may be under way.

    On a GPU, to read a tensor waits for all work that the stream was given before, such as the next step's passes. So
    a number that is left is copied to the host by a side stream, as soon as it is there.
    """

    def __init__(self, number: Tensor, transfer: dist.Work | None) -> None:
        self._number, self._transfer = number, transfer
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None  # on the host, and when it is there
        self._waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  # for the copy

    def leave(self) -> None:
        """Go on without the number; a later `read` does not wait for what the stream is given from now on."""
        if not self._number.is_cuda:
            return
        from distlab.comm.pending import Pending
        from distlab.machine.streams import copied_to_host, passed, side_stream

        transfer = self._transfer
        if isinstance(transfer, Pending) and not transfer.is_on_stream:  # the host brings the sum
            return
        side = side_stream(self._number.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if isinstance(transfer, Pending):
                transfer.follow()
                self._waiting = transfer.waiting
            elif transfer is not None:
                transfer.wait()
            self._copy = copied_to_host(self._number), passed()

    def has_arrived(self) -> bool:
        """Return whether `read` would return, or raise, at once."""
        if self._copy is not None:
            return self._copy[1].query()
        return self._transfer is None or self._transfer.is_completed()

    def read(self) -> float:
        """Wait for the number, the same on all ranks, and return it."""
        if self._copy is not None:
            on_host, done = self._copy
            with self._waiting():
                done.synchronize()
            return on_host.sum().item()
        if self._transfer is not None:
            self._transfer.wait()
        return self._number.sum().item()
