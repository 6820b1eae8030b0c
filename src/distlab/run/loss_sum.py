"""The loss of the global batch, and the error of a value that is not finite."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.axes.layout import Layout, times_counted
from distlab.comm.names import named

if TYPE_CHECKING:
    from distlab.comm.late import LateNumber


class NotFiniteError(RuntimeError):
    """A loss, or a norm of gradients, is infinite or NaN; all ranks raise this, with the same words."""


@dataclass
class LossSum:
    """The loss of a step's global batch, while the sum over the ranks is in progress."""

    step: int
    own: Tensor  # this rank's share, a scalar; float64
    total: Tensor  # the sum over all ranks, once it has arrived
    transfer: dist.Work | None
    counted: int  # how many times each micro-batch is counted in the sum
    late: "LateNumber | None" = None  # if the rank has gone on without it

    @classmethod
    def begin(cls, step: int, losses: Iterable[Tensor], layout: Layout, device: torch.device) -> "LossSum":
        """Start to add up the loss of the global batch.

        `losses` are this rank's micro-batch losses, scalars whose sum is the loss of its replica; empty if another
        stage of the replica computes them. Ranks that share a stage all compute the same losses.
        """
        own = sum((loss.detach().double() for loss in losses), torch.zeros((), dtype=torch.float64, device=device))
        total = own.clone()
        with named(f"the loss of step {step}", "loss"):
            transfer = dist.all_reduce(total, async_op=True)
        return cls(step, own, total, transfer, times_counted(layout))

    def leave(self) -> None:
        """Go on without the loss (`LateNumber.leave`)."""
        from distlab.comm.late import LateNumber

        self.late = LateNumber(self.total, self.transfer)
        self.late.leave()

    def wait(self) -> float:
        """Wait for the loss, which is the same on all ranks."""
        if self.late is not None:
            return self.late.read() / self.counted
        if self.transfer is not None:
            self.transfer.wait()
        return self.total.item() / self.counted
