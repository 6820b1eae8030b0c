"""Names that rooms still use for what is under way."""

from collections.abc import Sequence

import torch
from torch import Tensor

from distlab.comm.pending import Pending

Transfer = Pending


def wait_for_all(transfers: Sequence[Pending]) -> None:
    """Wait for several, in their order; `TrafficError` as of `Pending.wait`."""
    for transfer in transfers:
        transfer.wait()


def future_of(tensor: Tensor) -> "torch.futures.Future[Tensor]":
    """A future for a tensor; torch must know in advance if the tensor is on a GPU."""
    return torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
