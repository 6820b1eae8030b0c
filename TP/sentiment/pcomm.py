"""Process groups of tensor and data parallelism, and the collectives within a layer (pcomm: between processes).

    Function       forward               backward
    Duplication    nothing               sum over the group      "f" of Megatron-LM (Shoeybi et al., arXiv 1909.08053)
    AllReduce      sum over the group    nothing                 "g" of the same
    AllGather      shards side by side   own shard

A layer between the first two computes one term of its output on each rank: all ranks have the same input, and their
terms of the output, and of the gradient of the input, have to be added up. Results are new tensors, because autograd or
the previous layer may still need the input.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from distlab.axes.grid import Grid
from distlab.comm.names import named
from simplellm.errors import InputError

tp_grp: dist.ProcessGroup | None = None  # the ranks that share each layer; neighbors, as they communicate most
tp_rank, tp_degree = 0, 1  # this rank's number in `tp_grp`, and the number of its ranks
dp_grp: dist.ProcessGroup | None = None  # the ranks that hold the same shards, for other rows of the batch
dp_rank, dp_degree = 0, 1
slices = replicas = Grid(0, {}).axis()  # the ranks of the two groups


def init(tp: int) -> None:
    """Divide the ranks into groups of `tp` neighbors; every rank must call it, after `init_process_group`.

    Of 4 ranks with `tp` = 2, ranks 0 and 1 hold the shards of one replica, 2 and 3 of another; ranks 0 and 2
    average their gradients, and so do 1 and 3. Without this call each rank is a group of its own.

    Raises:
        InputError: the ranks do not divide into such groups.
        TrafficError: a rank does not take part.
    """
    global replicas, slices, tp_grp, tp_rank, tp_degree, dp_grp, dp_rank, dp_degree
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if tp < 1 or ranks % tp:
        raise InputError(f"--tp {tp}: the {ranks} ranks do not divide into groups of {tp}; give a divisor of {ranks}")
    tp_degree, dp_degree = tp, ranks // tp
    dp_rank, tp_rank = divmod(rank, tp)
    grid = Grid(rank, {"dp": dp_degree, "tp": tp})
    grid.make_groups()
    replicas, slices = grid.axis("dp"), grid.axis("tp")
    dp_grp, tp_grp = replicas.group, slices.group


class Duplication(torch.autograd.Function):
    """Pass the same `x` (any shape) to a layer's shards; the gradients of `x` are added up over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _sum(grad, "gradients")


class AllReduce(torch.autograd.Function):
    """Add up the ranks' `x` (any shape); the gradient of a sum is the gradient of each of its terms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sum(x, "activations")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)


class AllGather(torch.autograd.Function):
    """Concatenate the ranks' `x` (…, n), in the order of ranks: (…, n · degree)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if tp_degree == 1:
            return x.clone()
        shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(tp_degree)]
        with named("the activations of a layer", "tp activations"):
            dist.all_gather(shards, x.contiguous(), tp_grp)
        return torch.cat(shards, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(tp_degree, dim=-1)[tp_rank].contiguous()


def _sum(x: Tensor, what: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    if tp_degree > 1:
        with named(f"the {what} of a layer", f"tp {what}"):
            dist.all_reduce(total, group=tp_grp)
    return total
