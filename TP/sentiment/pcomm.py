"""Who shares a layer with whom, and what they tell each other (pcomm: between processes).

    Function       forward               backward
    Duplication    nothing               sum over the group      "f" of Megatron-LM (Shoeybi et al., arXiv 1909.08053)
    AllReduce      sum over the group    nothing                 "g" of the same
    AllGather      slices side by side   own slice

A layer between the first two computes a share of its result on each rank: all ranks have the same input, and what each
contributes to the output, and to the gradient of the input, has to be added up.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.traffic import rank, traffic, world_size
from simplellm.errors import InputError

tp_grp: dist.ProcessGroup | None = None  # the ranks that share each layer; neighbours, for they talk most
tp_rank, tp_degree = 0, 1  # this rank's number among them, and how many they are
dp_grp: dist.ProcessGroup | None = None  # the ranks that hold the same slices for other rows of the batch
dp_rank, dp_degree = 0, 1


def init(tp: int) -> None:
    """Divide the ranks into groups of `tp` neighbours; every rank calls it, after `init_process_group`.

    Of 4 ranks with `tp` = 2, ranks 0 and 1 share the layers, and so do 2 and 3; ranks 0 and 2 average their gradients,
    and so do 1 and 3.

    Raises:
        InputError: the ranks do not divide into such groups.
    """
    global tp_grp, tp_rank, tp_degree, dp_grp, dp_rank, dp_degree
    ranks = world_size()
    if tp < 1 or ranks % tp:
        raise InputError(f"--tp {tp}: the {ranks} ranks do not divide into groups of {tp}; give a divisor of {ranks}")
    tp_degree, dp_degree = tp, ranks // tp
    dp_rank, tp_rank = divmod(rank(), tp)
    # Every rank takes part in making every group, also of those that it is not in.
    tp_grp, _ = dist.new_subgroups_by_enumeration([list(range(i, i + tp)) for i in range(0, ranks, tp)])
    dp_grp, _ = dist.new_subgroups_by_enumeration([list(range(i, ranks, tp)) for i in range(tp)])


class Duplication(torch.autograd.Function):
    """Hand the same `x` (any shape) to each rank's share of a layer; their gradients of `x` add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _sum(grad, "the gradients of an input", "tp gradients")


class AllReduce(torch.autograd.Function):
    """Add up the ranks' `x` (any shape); the gradient of a sum is the gradient of each of its terms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sum(x, "the parts of an output", "tp activations")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)


class AllGather(torch.autograd.Function):
    """Lay the ranks' `x` (…, n) side by side, in the order of ranks: (…, n · degree)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        own = x.contiguous()
        parts = own.new_empty(tp_degree, *own.shape)
        traffic.all_gather(parts, own, "the slices of an output", kind="tp activations", group=tp_grp).wait()
        return torch.cat(parts.unbind(), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(tp_degree, dim=-1)[tp_rank].contiguous()


def _sum(x: Tensor, what: str, kind: str) -> Tensor:
    """The sum of the ranks' `x`, as a tensor of its own: autograd or the layer before may still need `x`."""
    total = x.clone(memory_format=torch.contiguous_format)
    if tp_degree > 1:  # without init() each rank is a group of its own
        traffic.all_reduce(total, what, kind=kind, op=dist.ReduceOp.SUM, group=tp_grp).wait()
    return total
