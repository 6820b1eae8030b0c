"""The ranks that share a module, and what they tell each other within it.

Each exchange is a linear map, so the backward pass through it is the transposed map:

    function            forward          backward
    copy_to             nothing          all-reduce         Megatron's f (Shoeybi et al., arXiv 1909.08053)
    reduce_from         all-reduce       nothing            Megatron's g
    gather              all-gather       own slice          what follows is the same on all ranks
    gather_to           all-gather       reduce-scatter     what follows differs, as behind f
    reduce_scatter      reduce-scatter   all-gather
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ReduceOp

from distlab.comm.endpoint import members, rank
from distlab.comm.traffic import traffic

LAYERS, VOCABULARY, NORMS = "layer", "vocabulary", "norm"  # whose traffic it is
FORWARD, BACKWARD = "activations", "gradients"  # and of what; the ledger's kinds are "layer activations", …
SEQUENCE = 1  # the dimension of activations (batch, seq, dmodel)


def shard_sizes(total: int, ranks: int) -> list[int]:
    """What each rank holds of `total` rows: the same number, and one more on the first ranks where they do not divide.

    The boundaries are those of `torch.tensor_split`.
    """
    return [total // ranks + (r < total % ranks) for r in range(ranks)]


@dataclass(frozen=True)
class TPGroup:
    """The ranks that share a module, and what their messages about it are called.

    Its methods are the collectives out of place: they leave their input as it is.

    Attributes:
        module: the module's name in the model.
        kind: `LAYERS`, `VOCABULARY` or `NORMS`, where the module is the lab's Llama's.
        group: the ranks; by default, all.
    """

    module: str
    kind: str
    group: "dist.ProcessGroup | None" = None

    @property
    def size(self) -> int:
        return len(members(self.group))

    @property
    def group_rank(self) -> int:
        """This rank's number among them."""
        return members(self.group).index(rank())

    def own_range(self, length: int) -> tuple[int, int]:
        """The first row of this rank's slice of `length` rows, and the first one after it."""
        sizes = shard_sizes(length, self.size)
        first = sum(sizes[: self.group_rank])
        return first, first + sizes[self.group_rank]

    def all_reduce(self, x: Tensor, what: str, op: "ReduceOp.RedOpType" = ReduceOp.SUM) -> Tensor:
        """The ranks' `x` (any shape) combined."""
        total = x.clone(memory_format=torch.contiguous_format)
        traffic.all_reduce(total, self._name(what), kind=f"{self.kind} {what}", op=op, group=self.group).wait()
        return total

    def all_gather(self, x: Tensor, what: str, dim: int, length: int) -> Tensor:
        """The ranks' slices along `dim`, `shard_sizes(length, size)` long, side by side."""
        sizes = shard_sizes(length, self.size)
        own = _pad(x, dim, sizes[0])
        parts = own.new_empty(self.size, *own.shape)
        traffic.all_gather(parts, own, self._name(what), kind=f"{self.kind} {what}", group=self.group).wait()
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def reduce_scatter(self, x: Tensor, what: str, dim: int) -> Tensor:
        """This rank's slice along `dim` of the sum of the ranks' `x`."""
        sizes = shard_sizes(x.shape[dim], self.size)
        parts = torch.stack([_pad(part, dim, sizes[0]) for part in x.split(sizes, dim)])
        own = torch.empty_like(parts[0])
        traffic.reduce_scatter(own, parts, self._name(what), kind=f"{self.kind} {what}", group=self.group).wait()
        return own.narrow(dim, 0, sizes[self.group_rank])

    def own_slice(self, x: Tensor, dim: int) -> Tensor:
        """This rank's slice of `x` along `dim`, a view."""
        return x.tensor_split(self.size, dim)[self.group_rank]

    def own_parameter(self, whole: Tensor, dim: int) -> nn.Parameter:
        """This rank's slice of a weight along `dim`, a copy: the whole can be forgotten.

        Its attribute `held_slice` tells checkpoints where it belongs: (dim, start, length of the whole along dim).
        """
        own = nn.Parameter(self.own_slice(whole.detach(), dim).clone(), requires_grad=whole.requires_grad)
        own.held_slice = dim, self.own_range(whole.shape[dim])[0], whole.shape[dim]  # type: ignore[attr-defined]
        return own

    def _name(self, what: str) -> str:
        return f"the {what} of {self.module}"


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    """`x`, contiguous, with zeros after it up to `length`: the parts of a collective are of equal size."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


class _LinearMap(torch.autograd.Function):
    """A linear map of a tensor, with the transposed one for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Callable[[Tensor], Tensor], transposed: Callable[[Tensor], Tensor]) -> Any:
        ctx.transposed = transposed
        return linear(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed(grad), None, None


def _unchanged(x: Tensor) -> Tensor:
    return x.view_as(x)


def copy_to(x: Tensor, tp_group: TPGroup) -> Tensor:
    """Hand `x`, the same on all ranks, to a slice of a layer on each; the slices' gradients of `x` add up."""
    y: Tensor = _LinearMap.apply(x, _unchanged, partial(tp_group.all_reduce, what=BACKWARD))
    return y


def reduce_from(x: Tensor, tp_group: TPGroup) -> Tensor:
    """Add up the ranks' `x`; the gradient of a sum is the gradient of each of its terms."""
    y: Tensor = _LinearMap.apply(x, partial(tp_group.all_reduce, what=FORWARD), _unchanged)
    return y


def gather(x: Tensor, tp_group: TPGroup, length: int, dim: int = -1) -> Tensor:
    """Lay the ranks' slices side by side: `length` along `dim`. All ranks must compute the same from the result."""
    whole = partial(tp_group.all_gather, what=FORWARD, dim=dim, length=length)
    y: Tensor = _LinearMap.apply(x, whole, partial(tp_group.own_slice, dim=dim))
    return y


def gather_to(x: Tensor, tp_group: TPGroup, length: int, dim: int = SEQUENCE) -> Tensor:
    """Like `gather`, but for a slice of a layer on each rank, whose gradients of the whole add up.

    What a layer keeps of the whole for its backward pass stays whole. (Korthikanti et al. keep the slice and gather
    again: less memory, more traffic.)
    """
    whole = partial(tp_group.all_gather, what=FORWARD, dim=dim, length=length)
    y: Tensor = _LinearMap.apply(x, whole, partial(tp_group.reduce_scatter, what=BACKWARD, dim=dim))
    return y


def reduce_scatter(x: Tensor, tp_group: TPGroup, dim: int = SEQUENCE) -> Tensor:
    """Add up the ranks' `x` and keep a slice along `dim` on each."""
    whole = partial(tp_group.all_gather, what=BACKWARD, dim=dim, length=x.shape[dim])
    y: Tensor = _LinearMap.apply(x, partial(tp_group.reduce_scatter, what=FORWARD, dim=dim), whole)
    return y
