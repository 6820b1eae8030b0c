"""A tensor-parallel group, and the collectives between the shards of a module, forward and backward.

Each collective is a linear map, so its backward pass is the transposed map:

    function            forward          backward
    copy_to             nothing          all-reduce         Megatron's f (Shoeybi et al., arXiv 1909.08053)
    reduce_from         all-reduce       nothing            Megatron's g
    gather              all-gather       own shard          if all ranks then compute the same
    gather_to           all-gather       reduce-scatter     if the ranks compute different things, as after f
    reduce_scatter      reduce-scatter   all-gather
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ReduceOp

from distlab.axes.grid import Axis, all_ranks
from distlab.axes.layout import equal_parts
from distlab.axes.placement import DimSlice, place, placement_of
from distlab.comm.group import all_gather_single, reduce_scatter_single
from distlab.comm.names import named
from simplellm.absent_weights import is_absent

LAYERS, VOCABULARY, NORMS, EXPERTS = "layer", "vocabulary", "norm", "expert"  # kinds of modules
FORWARD, BACKWARD = "activations", "gradients"  # the tensors sent; the kinds in the ledger are "layer activations", …
SEQUENCE = 1  # the dimension of activations (batch, seq, dmodel)


def place_slice(own: nn.Parameter, whole: Tensor, dim: int, axis: Axis | None = None) -> nn.Parameter:
    """Mark a parameter as this rank's slice of `whole` along `dim`, divided as by `torch.tensor_split`; return it.

    Checkpoints, clipping and averages then know which part it is.
    """
    axis, length = axis or all_ranks("tp"), whole.shape[dim]
    start = sum(equal_parts(length, axis.size)[: axis.rank])
    where = DimSlice(dim, start, length, axis.names)
    place(own, replace(placement_of(whole), slices=(*placement_of(whole).slices, where)))
    return own


@dataclass(frozen=True)
class TPGroup:
    """The ranks that hold the shards of a module. Its collectives do not change their input."""

    module: str  # its name in the model, for the names of waits
    kind: str  # `LAYERS`, `VOCABULARY`, `NORMS` or `EXPERTS`, for the ledger's columns
    axis: Axis = field(default_factory=partial(all_ranks, "tp"))

    def own_range(self, length: int) -> tuple[int, int]:
        """Return this rank's shard of `length` rows: its first row, and the row after its last."""
        sizes = equal_parts(length, self.axis.size)
        first = sum(sizes[: self.axis.rank])
        return first, first + sizes[self.axis.rank]

    def all_reduce(self, x: Tensor, what: str, op: "ReduceOp.RedOpType" = ReduceOp.SUM) -> Tensor:
        """Return the `x` (any shape) of all ranks, combined by `op`."""
        combined = x.detach().clone(memory_format=torch.contiguous_format)
        with self._named(what):
            dist.all_reduce(combined, op, self.axis.group)
        return combined

    def all_gather(self, x: Tensor, what: str, dim: int, length: int) -> Tensor:
        """Return the ranks' shards, of `equal_parts(length, size)` along `dim`, concatenated."""
        sizes = equal_parts(length, self.axis.size)
        parts = self._parts_like(x, dim, sizes[0])
        own = parts[self.axis.rank]
        own.narrow(dim, 0, x.shape[dim]).copy_(x)
        with self._named(what):
            all_gather_single(parts, own, self.axis.group)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def reduce_scatter(self, x: Tensor, what: str, dim: int) -> Tensor:
        """Return this rank's shard along `dim` of the sum of the ranks' `x`."""
        sizes = equal_parts(x.shape[dim], self.axis.size)
        parts = self._parts_like(x, dim, sizes[0])
        for part, shard in zip(parts, x.split(sizes, dim), strict=True):
            part.narrow(dim, 0, shard.shape[dim]).copy_(shard)
        own = torch.empty_like(parts[0])
        with self._named(what):
            reduce_scatter_single(own, parts, ReduceOp.SUM, self.axis.group)
        return own.narrow(dim, 0, sizes[self.axis.rank])

    def _parts_like(self, x: Tensor, dim: int, length: int) -> Tensor:
        """Return space for a part of each rank, (ranks, *x.shape) but `length` along `dim`: parts of equal size."""
        shape = list(x.shape)
        shape[dim] = length
        return x.new_empty([self.axis.size, *shape])

    def own_shard(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of `x` along `dim`; a view."""
        return x.tensor_split(self.axis.size, dim)[self.axis.rank]

    def own_parameter(self, whole: Tensor, dim: int) -> nn.Parameter:
        """Return this rank's shard of a weight along `dim`; a copy, so that the whole weight can be freed.

        An absent weight stays absent (`simplellm.absent_weights`).
        """
        own = self.own_shard(whole.detach(), dim)
        own = nn.Parameter(own if is_absent(own) else own.clone(), requires_grad=whole.requires_grad)
        return place_slice(own, whole, dim, self.axis)

    def _named(self, what: str) -> contextlib.AbstractContextManager[None]:
        return named(f"the {what} of {self.module}", f"{self.kind} {what}")


class _LinearMap(torch.autograd.Function):
    """A linear map of a tensor, whose gradient goes through the transposed map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Callable[[Tensor], Tensor], transposed: Callable[[Tensor], Tensor]) -> Any:
        ctx.transposed = transposed
        return linear(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed(grad), None, None


def linear_map(x: Tensor, linear: Callable[[Tensor], Tensor], transposed: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `linear(x)`, whose gradient goes through the transposed map."""
    return _LinearMap.apply(x, linear, transposed)


def _unchanged(x: Tensor) -> Tensor:
    return x.view_as(x)


def copy_to(x: Tensor, tp_group: TPGroup) -> Tensor:
    """Pass `x`, the same on all ranks, to a layer's shards; the gradients of `x` are added up over the ranks."""
    return linear_map(x, _unchanged, partial(tp_group.all_reduce, what=BACKWARD))


def reduce_from(x: Tensor, tp_group: TPGroup) -> Tensor:
    """Add up the ranks' `x`; the gradient of a sum is the gradient of each of its terms."""
    return linear_map(x, partial(tp_group.all_reduce, what=FORWARD), _unchanged)


def gather(x: Tensor, tp_group: TPGroup, length: int, dim: int = -1) -> Tensor:
    """Concatenate the ranks' shards to `length` along `dim`. All ranks must compute the same from the result."""
    whole = partial(tp_group.all_gather, what=FORWARD, dim=dim, length=length)
    return linear_map(x, whole, partial(tp_group.own_shard, dim=dim))


def gather_to(x: Tensor, tp_group: TPGroup, length: int) -> Tensor:
    """Concatenate shards of sequences for the input of a layer's shards: the ranks' gradients of it are added up.

    The gathered tensor is saved for the backward pass; Korthikanti et al. save the shard and gather it again.
    """
    whole = partial(tp_group.all_gather, what=FORWARD, dim=SEQUENCE, length=length)
    return linear_map(x, whole, partial(tp_group.reduce_scatter, what=BACKWARD, dim=SEQUENCE))


def reduce_scatter(x: Tensor, tp_group: TPGroup) -> Tensor:
    """Add up the ranks' `x` and keep this rank's shard of the sequence."""
    whole = partial(tp_group.all_gather, what=BACKWARD, dim=SEQUENCE, length=x.shape[SEQUENCE])
    return linear_map(x, partial(tp_group.reduce_scatter, what=FORWARD, dim=SEQUENCE), whole)
