"""The loss of the global batch, and the error of a value that is not finite."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


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

    def wait(self) -> float:
        """Wait for the loss, which is the same on all ranks."""
        if self.transfer is not None:
            self.transfer.wait()
        return self.total.item() / self.counted
