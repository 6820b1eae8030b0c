"""Parameters side by side in a flat buffer, and their gradients in another; each rank owns a shard of both."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from distlab.axes.grid import Axis, all_ranks
from distlab.axes.placement import FlatRange, holders, place, placement_of
from distlab.comm.group import all_gather_single, empty, reduce_scatter_single
from distlab.comm.names import named
from distlab.comm.pending import Pending
from distlab.parallel.data import Bucket
from distlab.parallel.flat import divisible, elements_of, views_of
from distlab.parallel.options import Sharded
from simplellm.absent_weights import absent

HALF = (torch.bfloat16, torch.float16)  # dtypes whose shards are updated in float32


@dataclass
class Gathered:
    """Counts the bytes of buffers that are whole temporarily."""

    now_bytes: int = 0
    peak_bytes: int = 0

    def count(self, more_bytes: int) -> None:
        """Count bytes that this rank now holds; a negative number: that it no longer holds."""
        self.now_bytes += more_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def allocate(self, flat: Tensor) -> None:
        """Give a freed buffer its memory again."""
        flat.untyped_storage().resize_(flat.nbytes)
        self.count(flat.nbytes)

    def free(self, flat: Tensor) -> None:
        """Free a buffer's memory; its views stay."""
        flat.untyped_storage().resize_(0)
        self.count(-flat.nbytes)


def is_whole(flat: Tensor) -> bool:
    """Return whether a buffer has its memory."""
    return flat.untyped_storage().nbytes() > 0


def new_flat(parameters: Sequence[Tensor], axis: Axis, is_kept: bool, dtype: torch.dtype | None) -> Tensor:
    """Return zeros (elements,) for parameters side by side, padded to equal parts for the ranks along an axis.

    A buffer that is kept permanently is in memory that these ranks share, if possible.
    """
    like = parameters[0].detach().new_empty(0, dtype=dtype)
    elements = divisible(elements_of(parameters), axis.size)
    return empty(elements, like, axis.group) if is_kept else like.new_zeros(elements)


class Range(NamedTuple):
    """The part of a parameter in a shard."""

    of_shard: slice  # its range in the shard
    start: int  # its beginning in the parameter


def own_ranges(parameters: Iterable[nn.Parameter], rank: int, length: int) -> Iterator[tuple[nn.Parameter, Range]]:
    """Yield each of the parameters, which lie side by side, with its part in a rank's shard of `length` elements."""
    own, first = rank * length, 0  # offsets of the shard and the parameter in the flat buffer
    for parameter in parameters:
        start = min(max(own, first), first + parameter.numel())
        stop = max(min(own + length, first + parameter.numel()), start)
        yield parameter, Range(slice(start - own, stop - own) if stop > start else slice(0), start - first)
        first += parameter.numel()


def _shard(parameter: nn.Parameter, own: Tensor, where: Range, axis: Axis) -> nn.Parameter:
    part = own[where.of_shard].view(-1, *[1] * (parameter.dim() - 1))
    shard = nn.Parameter(part, requires_grad=parameter.requires_grad)
    place(shard, replace(placement_of(parameter), flat=FlatRange(where.start, parameter.shape, axis.names)))
    return shard


def shards_of(model: nn.Module, own_weights: Tensor, own_gradients: Tensor) -> dict[str, nn.Parameter]:
    """Return a model's shards in this rank's range of all weights, by the parameters' names: for an optimizer.

    A shard is (elements, 1, …), with as many dimensions as its parameter; empty if this rank has no part of it.

    Args:
        model: its parameters lie side by side (`flatten_weights`), and all are trained.
        own_weights: this rank's range of the weights, (elements / ranks,), of which the shards become views.
        own_gradients: its range of the gradients (`flatten_gradients`), of which the shards' gradients become views.

    Raises:
        ValueError: a range has the wrong length, or a parameter is frozen.
    """
    axis, parameters = all_ranks("dp"), list(model.parameters())
    if not all(parameter.requires_grad for parameter in parameters):
        raise ValueError("a frozen parameter has no gradient: ranges of weights and of gradients would differ")
    length = -(-elements_of(parameters) // axis.size)
    for what, own in (("weights", own_weights), ("gradients", own_gradients)):
        if len(own) != length:
            raise ValueError(f"a rank's range of the {what} has {length:,} elements, not {len(own):,}")
    names = {parameter: name for name, parameter in model.named_parameters()}
    shards: dict[str, nn.Parameter] = {}
    for parameter, where in own_ranges(names, axis.rank, len(own_weights)):
        shards[names[parameter]] = shard = _shard(parameter, own_weights, where, axis)
        shard.grad = own_gradients[where.of_shard].view_as(shard)
    return shards


class FlatParameters:
    """Parameters of one dtype side by side in a flat buffer, of which each rank along an axis owns an equal part.

    That part is its shard. The last shards may be padded with zeros, which belong to no parameter.

    Args:
        dtype: of the buffer, and so of the parameters from now on; their gradients keep the dtype that they had.
        value_of: the value of a parameter, whole or as far as its placement's slices go; by default, what it holds.

    Attributes:
        flat: the buffer (elements,), of which the parameters are views.
        shard: this rank's part, which the optimizer updates; in float32 also for a model in fewer bits.
        shards: each parameter's part in `shard`: (elements, 1, …), with as many dimensions as the parameter.
        gradients: of the parameters; None if they are frozen.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shard: Sharded,
        axis: Axis,
        gathered: Gathered,
        dtype: torch.dtype,
        value_of: Callable[[nn.Parameter], Tensor] = Tensor.detach,
    ) -> None:
        self.parameters, self.axis, self._gathered = parameters, axis, gathered
        self._is_freed, is_trained = shard == "weights", parameters[0].requires_grad
        self._dtype = parameters[0].dtype  # of the parameters, before they become views
        self.flat = new_flat(parameters, axis, not self._is_freed, dtype)
        self._views = views_of(self.flat, parameters)
        self._parts = self.flat.view(axis.size, -1)  # (ranks, elements of a shard)
        self._to_send = own = self._parts[axis.rank]
        if self._is_freed:
            self._to_send = empty(len(own), own, axis.group)
        has_master = dtype in HALF and (is_trained or dtype != self._dtype)
        self.shard = torch.zeros_like(own, dtype=torch.float32) if has_master else self._to_send  # master weights
        self._ranges = dict(own_ranges(parameters, axis.rank, len(own)))
        for parameter, view in zip(parameters, self._views, strict=True):
            self._fill(parameter, view, value_of(parameter))
            parameter.data = view
            if is_trained and dtype != self._dtype:
                parameter.grad_dtype = self._dtype
        if self._is_freed:
            self._to_send.copy_(own)
        self.shards = {p: _shard(p, self.shard, where, axis) for p, where in self._ranges.items()}
        self.gradients = GradientShard(self, shard, gathered) if is_trained else None
        self._arriving: Pending | None = None
        self._absent = [absent(p) for p in parameters]
        if self._is_freed:
            gathered.now_bytes += self.flat.nbytes
            self.free()

    def _fill(self, parameter: nn.Parameter, view: Tensor, value: Tensor) -> None:
        """Write a parameter's value to its view, and this rank's part of it, not rounded, to the master weights."""
        view.copy_(value)
        if self.shard is not self._to_send:
            where = self._ranges[parameter]
            part = self.shard[where.of_shard]
            part.copy_(value.flatten()[where.start : where.start + len(part)])

    @property
    def weight_bytes(self) -> int:
        """Bytes held permanently: the shard, or all weights; and the shard's master weights."""
        weights = self._to_send.nbytes if self._is_freed else self.flat.nbytes
        return weights + (0 if self.shard is self._to_send else self.shard.nbytes)

    def publish(self) -> None:
        """Round master weights to the model's dtype."""
        if self.shard is not self._to_send:
            self._to_send.copy_(self.shard)

    def gather(self) -> None:
        """Start to collect all ranks' shards of the weights."""
        if self._is_freed:
            if is_whole(self.flat):
                return
            self._gathered.allocate(self.flat)
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.data = view
        self.arrive()
        with named("the weights", "weights"):
            self._arriving = all_gather_single(self._parts, self._to_send, self.axis.group, async_op=True)

    def arrive(self) -> None:
        """Wait for the weights."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def whole(self) -> list[Tensor]:
        """Return new tensors with the parameters' values: those of the shards, in the dtype that the model had."""
        own = self.shard.detach()
        parts = own.new_empty(self.axis.size, len(own))
        with named("the weights", "weights"):
            all_gather_single(parts, own, self.axis.group)
        return [view.to(self._dtype) for view in views_of(parts.view(-1), self.parameters)]

    def free(self) -> None:
        """Free the other ranks' weights, if this rank does not keep them."""
        if not self._is_freed or not is_whole(self.flat):
            return
        self.arrive()
        self._gathered.free(self.flat)
        for parameter, freed in zip(self.parameters, self._absent, strict=True):
            parameter.data = freed

    def give_gradients(self) -> None:
        """Set each shard's `grad` to this step's gradient."""
        if self.gradients is not None:
            mean = self.gradients.take()
            for parameter, where in self._ranges.items():
                self.shards[parameter].grad = mean[where.of_shard].view_as(self.shards[parameter])


def flats_of(
    parameters: Sequence[nn.Parameter],
    shard: Sharded,
    over: Axis,
    gathered: Gathered,
    rounded: Collection[nn.Parameter],
    value_of: Callable[[nn.Parameter], Tensor],
) -> list[FlatParameters]:
    """Return flat parameters, each of one dtype, device and set of ranks along `over` that hold the same part.

    `rounded` ones are gathered as bfloat16. `value_of` returns the value of a parameter.
    """

    def kind(p: nn.Parameter) -> tuple[bool, bool, str, str, tuple[str, ...]]:
        return p.requires_grad, p in rounded, str(p.dtype), str(p.device), holders(p, over).names

    flats: list[FlatParameters] = []
    for _, alike in groupby(sorted(parameters, key=kind), kind):
        same = [*alike]
        dtype = torch.bfloat16 if same[0] in rounded else same[0].dtype
        flats.append(FlatParameters(same, shard, holders(same[0], over), gathered, dtype, value_of))
    return flats


class GradientShard(Bucket):
    """The gradients of flat parameters; the ranks add them up, and each gets its shard of the mean."""

    def __init__(self, flats: FlatParameters, shard: Sharded, gathered: Gathered) -> None:
        axis, self._gathered = flats.axis, gathered
        self._is_freed = shard != "optimizer"  # between the passes
        flat = new_flat(flats.parameters, axis, not self._is_freed, flats.parameters[0].grad_dtype)
        super().__init__(0, flats.parameters, flat, axis)
        self._reduce_in(self.flat)
        is_in_place = not self._is_freed and flats.shard.dtype == self.flat.dtype
        self._mean = self._own if is_in_place else torch.zeros_like(flats.shard)
        self._is_first = True  # nothing has been added to the mean in this step
        self._reduction: Pending | None = None
        self._buffer: Tensor | None = None  # the buffer in which the gradients are reduced, if not in `flat`
        if self._is_freed:
            self.flat.untyped_storage().resize_(0)

    def _reduce_in(self, buffer: Tensor) -> None:
        self._parts = buffer.view(self.axis.size, -1)  # (ranks, elements of a shard)
        self._own = self._parts[self.axis.rank]

    def send_from(self, buffer: Tensor) -> None:
        """Copy the gradients to a buffer of several buckets, (elements,), in which one is reduced after another."""
        self._buffer = buffer[: len(self.flat)]
        self._reduce_in(self._buffer)

    @property
    def held_bytes(self) -> int:
        """Bytes held permanently: the gradient of the shard, or of all parameters."""
        whole = 0 if self._is_freed else self.flat.nbytes
        return whole + (0 if self._mean is self._own else self._mean.nbytes)

    def prepare(self) -> None:
        if self._reduction is not None and self._buffer is None:
            self._reduction.wait()
        if not is_whole(self.flat):
            self._gathered.allocate(self.flat)

    def reduce(self) -> Pending:
        """Start to add up the ranks' gradients."""
        for parameter in self.parameters:
            parameter.grad = None  # the next backward pass makes a new tensor
        if self._buffer is not None:
            self._buffer.copy_(self.flat)
            self._gathered.free(self.flat)
        with named(str(self), "gradients"):
            started = reduce_scatter_single(self._own, self._parts, ReduceOp.SUM, self.axis.group, async_op=True)
        self._gathered.count(started.buffer_bytes)
        self._reduction = started.then(partial(self._add, started.buffer_bytes))
        return self._reduction

    @torch.no_grad()
    def _add(self, received: int) -> None:
        """Add this rank's shard of the mean from the reduction in a backward pass."""
        self._reduction = None
        self._gathered.count(-received)
        self._own.div_(self.axis.size)
        if self._mean is not self._own:
            self._mean.copy_(self._own) if self._is_first else self._mean.add_(self._own)
        self._is_first = False
        if self._is_freed and self._buffer is None:
            self._gathered.free(self.flat)

    def take(self) -> Tensor:
        """Return this step's mean gradient of the shard, (elements,); the next reduction starts a new step."""
        self._is_first = True
        return self._mean
