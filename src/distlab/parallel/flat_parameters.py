"""Parameters side by side in flat buffers, of which each rank owns a shard, and the reduction of their gradients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from distlab.comm.grid import Axis
from distlab.comm.placement import FlatRange, place, placement_of
from distlab.comm.traffic import traffic
from distlab.comm.transfer import Transfer
from distlab.parallel.data import Bucket, elements_of, views_of
from distlab.parallel.division import Sharded

HALF = (torch.bfloat16, torch.float16)  # dtypes whose shards are updated in float32


@dataclass
class Held:
    """Counts the bytes of buffers that are whole for a while."""

    now_bytes: int = 0
    peak_bytes: int = 0

    def hold(self, more_bytes: int) -> None:
        """Count bytes that this rank holds from now on; with a negative number, that it holds no longer."""
        self.now_bytes += more_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def allocate(self, flat: Tensor) -> None:
        """Give a freed buffer its memory again."""
        flat.untyped_storage().resize_(flat.nbytes)
        self.hold(flat.nbytes)

    def free(self, flat: Tensor) -> None:
        """Free a buffer's memory; its views stay."""
        flat.untyped_storage().resize_(0)
        self.hold(-flat.nbytes)


def new_flat(parameters: Sequence[Tensor], axis: Axis, is_kept: bool = True) -> Tensor:
    """Zeros (elements,) for parameters side by side, filled up to an equal part for each rank along an axis.

    If the buffer is kept all the time, it is in memory that these ranks share, if they can.
    """
    like = parameters[0].detach()
    elements = -(-elements_of(parameters) // axis.size) * axis.size
    return traffic.new_buffer(elements, like, axis.group) if is_kept else like.new_zeros(elements)


def is_whole(flat: Tensor) -> bool:
    """Whether a buffer has its memory."""
    return flat.untyped_storage().nbytes() > 0


class FlatParameters:
    """Parameters of one dtype side by side in a flat buffer, of which each rank along an axis owns an equal part.

    That part is its shard. The last ones may be filled up with zeros, which are nobody's.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shard: Sharded, axis: Axis, held: Held) -> None:
        self.parameters, self.axis, self._held = parameters, axis, held
        self._shares_weights, self._shares_gradients = shard == "weights", shard != "optimizer"
        self.flat = new_flat(parameters, axis, is_kept=not self._shares_weights)
        self._views = views_of(self.flat, parameters)
        for parameter, view in zip(parameters, self._views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.parts = self.flat.view(axis.size, -1)  # (ranks, elements of a shard)
        self._in_whole = self.parts[axis.rank]
        self._start = axis.rank * len(self._in_whole)
        is_half, is_trained = self.flat.dtype in HALF, parameters[0].requires_grad
        self._to_send = self._in_whole
        if self._shares_weights:
            self._to_send = traffic.new_buffer(len(self._in_whole), self.flat, axis.group).copy_(self._in_whole)
        self.own = self._to_send.float() if is_half and is_trained else self._to_send  # master weights
        self.bucket = ShardedBucket(self, held) if is_trained else None
        self._gradient: Tensor | None = None  # of the shard
        if self.bucket is not None:
            in_place = shard == "optimizer" and not is_half
            self._gradient = self.bucket.own if in_place else torch.zeros_like(self.own)
        self._is_first = True  # nothing has been added to the gradient in this step
        self._arriving: Transfer | None = None
        self._own_parameters = [
            (parameter, self._shard_of(parameter, self.own[where.start : where.stop], start))
            for parameter, where, start in self._own_ranges()
        ]
        self._absent = [p.detach().new_full((1,), torch.nan).expand(p.shape) for p in parameters]
        if self._shares_weights:
            self._held.now_bytes += self.flat.nbytes
            self.free()
        if self.bucket is not None and self._shares_gradients:
            self.bucket.flat.untyped_storage().resize_(0)

    def _own_ranges(self) -> Iterator[tuple[nn.Parameter, range, int]]:
        """For each parameter, where in the shard this rank's part of it lies, and where in the parameter it begins."""
        first = 0  # of the parameter, in the flat buffer
        for parameter in self.parameters:
            start = min(max(self._start, first), first + parameter.numel())
            stop = max(min(self._start + len(self.own), first + parameter.numel()), start)
            yield parameter, range(start - self._start, stop - self._start) if stop > start else range(0), start - first
            first += parameter.numel()

    def _shard_of(self, parameter: nn.Parameter, own: Tensor, start: int) -> nn.Parameter:
        """This rank's shard of a parameter, whose elements begin at `start`."""
        shard = nn.Parameter(own.view(-1, *[1] * (parameter.dim() - 1)), requires_grad=parameter.requires_grad)
        place(shard, replace(placement_of(parameter), flat=FlatRange(start, parameter.shape, self.axis.names)))
        return shard

    def own_parameters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter and this rank's shard of it."""
        return self._own_parameters

    @property
    def weight_bytes(self) -> int:
        """Held all the time: the shard, or all weights; and the shard's master weights."""
        weights = self._to_send.nbytes if self._shares_weights else self.flat.nbytes
        return weights + (0 if self.own is self._to_send else self.own.nbytes)

    @property
    def gradient_bytes(self) -> int:
        """Held all the time: the shard's gradient, or the whole one."""
        if self.bucket is None or self._gradient is None:
            return 0
        whole = 0 if self._shares_gradients else self.bucket.flat.nbytes
        return whole + (0 if self._gradient is self.bucket.own else self._gradient.nbytes)

    def publish(self) -> None:
        """Round master weights to the model's dtype."""
        if self.own is not self._to_send:
            self._to_send.copy_(self.own)

    def gather(self, what: str) -> None:
        """Start to collect all ranks' shards of the weights."""
        if self._shares_weights:
            if is_whole(self.flat):
                return
            self._held.allocate(self.flat)
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.data = view
        self.arrive()
        self._arriving = traffic.all_gather(self.parts, self._to_send, what, kind="weights", group=self.axis.group)

    def arrive(self) -> None:
        """Wait for the weights."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def free(self) -> None:
        """Free the other ranks' weights, if this rank does not keep them."""
        if not self._shares_weights or not is_whole(self.flat):
            return
        self.arrive()
        self._held.free(self.flat)
        for parameter, absent in zip(self.parameters, self._absent, strict=True):
            parameter.data = absent

    @torch.no_grad()
    def add_gradient(self, mean: Tensor) -> None:
        """Take what has been reduced in a backward pass: this rank's shard of it."""
        assert self._gradient is not None
        if self._gradient is not mean:
            self._gradient.copy_(mean) if self._is_first else self._gradient.add_(mean)
        self._is_first = False

    def give_gradients(self) -> None:
        """Have each shard's `grad` be that of this step."""
        self._is_first = True
        if self._gradient is not None:
            for (_, own), (_, where, _) in zip(self._own_parameters, self._own_ranges(), strict=True):
                own.grad = self._gradient[where.start : where.stop].view_as(own)


class ShardedBucket(Bucket):
    """The gradients of flat parameters, which the ranks add up so that each gets its shard."""

    def __init__(self, flats: FlatParameters, held: Held) -> None:
        axis = flats.axis
        super().__init__(0, flats.parameters, new_flat(flats.parameters, axis, not flats._shares_gradients), axis)
        self._flats, self._held = flats, held
        self._parts = self.flat.view(axis.size, -1)  # (ranks, elements of a shard)
        self.own = self._parts[axis.rank]
        self._reduction: Transfer | None = None
        self._buffer: Tensor | None = None  # with sharded gradients, where they are reduced, if not in `flat`

    def send_from(self, buffer: Tensor) -> None:
        """Copy the gradients to a buffer of several buckets, (elements,), of which one at a time is reduced there."""
        self._buffer = buffer[: len(self.flat)]
        self._parts = self._buffer.view(self.axis.size, -1)
        self.own = self._parts[self.axis.rank]

    def prepare(self) -> None:
        if self._reduction is not None and self._buffer is None:
            self._reduction.wait()
        if not is_whole(self.flat):
            self._held.allocate(self.flat)

    def reduce(self) -> Transfer:
        """Start to add up the ranks' gradients."""
        group = self.axis.group
        for parameter in self.parameters:
            parameter.grad = None  # what follows in the next backward pass is a tensor of its own
        if self._buffer is not None:
            self._buffer.copy_(self.flat)
            self._held.free(self.flat)
        self._received_bytes = traffic.received_bytes(self._parts, group)
        self._held.hold(self._received_bytes)
        transfer = traffic.reduce_scatter(self.own, self._parts, str(self), kind="gradients", group=group)
        self._reduction = transfer.then(self._take)
        return self._reduction

    def _take(self) -> None:
        self._reduction = None
        self._held.hold(-self._received_bytes)
        self.own.div_(len(self._parts))
        self._flats.add_gradient(self.own)
        if self._flats._shares_gradients and self._buffer is None:
            self._held.free(self.flat)
