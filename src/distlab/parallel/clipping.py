"""Clipping by the global norm: if the norm of all gradients together exceeds a limit, all gradients are scaled down.

(Pascanu et al., "On the difficulty of training recurrent neural networks", arXiv 1211.5063.) It is the norm of the
whole model's gradient, so each weight counts once, whichever ranks hold it. Each rank adds up the squares of the
gradients that it holds; if several ranks hold a gradient, each adds an equal share. The ranks exchange only these sums,
one number each.

The sum depends on who adds up what, by rounding. With `exact`, it does not: of the ranks that hold a gradient, only the
first one adds its square, to a number for its place in a replica; each of these numbers has one source.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.axes.grid import Grid
from distlab.axes.layout import REPLICAS
from distlab.axes.placement import holders
from distlab.comm.late import LateNumber
from distlab.comm.names import named

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class NormSum(LateNumber):
    """The global norm, while its square, float64, a scalar or parts of it, is added up over the ranks."""

    def wait(self) -> float:
        """Return the norm, the same number on all ranks."""
        return math.sqrt(self.read())


@torch.no_grad()
def sum_norm(parameters: Iterable[Tensor], grid: Grid, what: str, device: torch.device, exact: bool = False) -> NormSum:
    """Start to add up the squared norm of the gradients over all ranks; all of them must call this.

    Args:
        parameters: this rank's parameters, or its parts of them according to their placements.
        grid: this rank's position among the ranks that hold parts of the model.
        what: name of the wait.
        device: device of the gradients.
        exact: give the same norm bit for bit whichever of the replicas' ranks are left.
    """
    everywhere, squared = grid.axis(*grid.layout), torch.zeros((), dtype=torch.float64, device=device)
    on = {parameter: holders(parameter, everywhere) for parameter in parameters}
    sizes = {parameter: ranks.size for parameter, ranks in on.items()}
    is_whole = bool(sizes) and all(size == grid.size for size in sizes.values())
    if exact and not is_whole:
        sizes = {parameter: 1 for parameter, ranks in on.items() if ranks.rank == 0}
    if held := [parameter for parameter in sizes if parameter.grad is not None]:
        # In float32, the sum of the squares of a whole matrix would have only four or five correct digits.
        norms = [torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) for parameter in held]
        counted = [1 if is_whole else sizes[parameter] for parameter in held]  # a tensor of these would wait for a GPU
        squared = torch.stack(torch._foreach_div(torch._foreach_mul(norms, norms), counted)).sum()
    if is_whole:
        return NormSum(squared, None)
    with named(what, "gradient norm"):
        if exact:
            here = [grid.rank in ranks for ranks in grid.ranks_along((REPLICAS,))]
            squared = torch.where(torch.tensor(here, device=device), squared, 0.0)
        return NormSum(squared, dist.all_reduce(squared, ReduceOp.SUM, async_op=True))


def is_too_long(norm: float, most: float) -> bool:
    """Return whether gradients with this global norm have to be clipped to `most`; true if the norm is NaN."""
    return not most / (norm + EPSILON) >= 1


@torch.no_grad()
def clip(gradients: Iterable[Tensor], norm: float, most: float) -> None:
    """Scale gradients in place so that their global norm, now `norm`, is at most `most`."""
    gradients = list(gradients)
    if gradients and is_too_long(norm, most):
        torch._foreach_mul_(gradients, most / (norm + EPSILON))
