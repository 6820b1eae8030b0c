"""Clipping by the global norm: if the gradients of all weights together are longer than a limit, all are scaled down.

(Pascanu et al., "On the difficulty of training recurrent neural networks", arXiv 1211.5063.) The norm is that of the
whole model's gradient, so each weight counts once, whichever ranks hold it. A rank adds up the squares of what it
holds; where several ranks hold the same, each adds an equal share of it. One number for each rank is all that is sent.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.traffic import Group, traffic
from distlab.comm.transfer import Transfer

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
Held = tuple[Tensor, int]  # a gradient, any shape, and how many ranks of the group hold the same


@dataclass(frozen=True)
class NormSum:
    """The global norm, while the ranks add up its square."""

    squared: Tensor  # a scalar, float64; of all ranks once the transfer has ended
    transfer: Transfer | None  # None where every rank holds everything

    def wait(self) -> float:
        """The norm, the same number on all ranks."""
        if self.transfer is not None:
            self.transfer.wait()
        return math.sqrt(self.squared.item())


def sum_norm(gradients: Iterable[Held], what: str, device: torch.device, group: Group = None) -> NormSum:
    """Start to add up the squared norm of gradients over the ranks of a group, all of which call it.

    Args:
        gradients: this rank's.
        what: the name of the wait.
        device: of the gradients.
        group: the ranks that hold parts of the model; by default, all.
    """
    squared = squared_norm(gradients, device)
    return NormSum(squared, traffic.all_reduce(squared, what, kind="gradient norm", op=ReduceOp.SUM, group=group))


@torch.no_grad()
def squared_norm(gradients: Iterable[Held], device: torch.device) -> Tensor:
    """This rank's part of the squared norm of all gradients: a scalar, float64."""
    held = list(gradients)
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    # A sum in float32 of as many squares as a matrix has would be right to four or five digits only.
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient, _ in held])
    return (norms.square() / torch.tensor([ranks for _, ranks in held], device=device)).sum()


def is_too_long(norm: float, most: float) -> bool:
    """Whether gradients of a global norm are clipped if it may be at most so much; also if it is no number."""
    return not most / (norm + EPSILON) >= 1


@torch.no_grad()
def clip(gradients: Iterable[Tensor], norm: float, most: float) -> None:
    """Scale gradients, in place, such that their global norm, which is `norm`, is at most `most`."""
    if is_too_long(norm, most):
        for gradient in gradients:
            gradient.mul_(most / (norm + EPSILON))
