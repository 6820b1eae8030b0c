"""Data parallelism in buckets: gradients are averaged while the backward pass computes others.

Buckets, and their overlap with the backward pass, follow Li et al., "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training", VLDB 2020, arXiv 2006.15704. (In memory that the ranks of one host share, there is no overlap:
a rank computes its part when it waits.)
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

from distlab.axes.grid import Axis, all_ranks
from distlab.axes.placement import holders
from distlab.comm.group import empty
from distlab.comm.names import named
from distlab.parallel.flat import elements_of, views_of
from distlab.parallel.options import BUCKET_BYTES
from distlab.parallel.same_model import broadcast_weights

TensorT = TypeVar("TensorT", bound=Tensor)


class Bucket:
    """The gradients of several parameters in one flat buffer, so that one message carries them all.

    The buffer may be longer than the gradients. `axis` has the ranks that have gradients of the same parameters.
    """

    def __init__(self, index: int, parameters: Sequence[Tensor], flat: Tensor, axis: Axis) -> None:
        self.index = index  # in the order in which the backward pass fills the buckets
        self.parameters, self.flat, self.axis = parameters, flat, axis  # flat: (elements,)
        self.views = views_of(flat, parameters)
        self.expected: dict[Tensor, int] = {}  # gradients that each parameter lacks until the bucket is full
        self.missing = 0  # parameters that the bucket lacks until it is full

    def __str__(self) -> str:
        return f"the gradients of bucket {self.index}"

    def expect(self, backward_passes: int) -> None:
        """Set how many backward passes fill the bucket."""
        self.expected, self.missing = dict.fromkeys(self.parameters, backward_passes), len(self.parameters)

    def prepare(self) -> None:
        """Prepare for a gradient to be written; called before the first gradient of a parameter."""


OnFull = Callable[[Bucket], dist.Work | None]


class GradientBuckets:
    """Collects gradients into buckets during the backward pass, and reports when each bucket is full.

    The backward pass reaches the last layers first, so buckets are filled from the end of the model, and passed to
    `on_full` in that order on every rank. After the backward pass, each `parameter.grad` is a view of its bucket: an
    operation on the flat buffer, such as an average, changes the gradients without a copy back. Tied parameters count
    once, frozen parameters not at all. A bucket's parameters are combined over the same ranks, `bucket.axis`: the ranks
    along `over` that hold the same part of them.

    Args:
        parameters: the model's parameters, in the order of the model.
        on_full: called during the backward pass when a bucket is full; returns the collective that it starts, if any.
        backward_passes: gradients are accumulated over this many backward passes before a bucket is full.
        bucket_bytes: size at which a bucket is closed; small buckets start early, large ones need fewer messages.
        over: the ranks that have different data, by default all. They must construct their buckets together: if
            possible, a bucket is in memory that the ranks which combine it share (`distlab.comm.group.empty`).
        buckets: used instead of buckets made from the parameters.
        rounds: number of times that a step fills each bucket.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        on_full: OnFull,
        backward_passes: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        over: Axis | None = None,
        *,
        buckets: Sequence[Bucket] | None = None,
        rounds: int = 1,
    ) -> None:
        self._on_full, self._backward_passes, self._rounds = on_full, backward_passes, rounds
        self._under_way: list[dist.Work] = []
        if buckets is None:
            buckets = []
            for some, axis in split_into_buckets(list(parameters)[::-1], over or all_ranks("dp"), bucket_bytes):
                flat = empty(elements_of(some), some[0], axis.group)
                buckets.append(Bucket(len(buckets), some, flat, axis))
        self._buckets = buckets
        self._places: dict[Tensor, tuple[Bucket, Tensor]] = {}  # by parameter, with its view of the bucket
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                self._places[parameter] = bucket, view
                parameter.register_post_accumulate_grad_hook(weakly(self._collect))
        self.restart()

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def finish(self) -> None:
        """End a step: report incomplete buckets, with zeros for unused parameters, and wait for all collectives."""
        while self._handed_over < self._rounds * len(self._buckets):
            bucket = self._next_bucket()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is None:
                    bucket.prepare()
                    parameter.grad = view.zero_()
            self._hand_over()
        self.restart()

    def restart(self) -> None:
        """Begin a step; also resets the state after a backward pass that raised an exception."""
        self._handed_over = 0  # buckets in this step, over all rounds
        for bucket in self._buckets:
            bucket.expect(self._backward_passes)
        while self._under_way:  # otherwise they would overwrite gradients
            self._under_way.pop(0).wait()

    def _hand_over(self) -> None:
        bucket = self._next_bucket()
        self._handed_over += 1
        bucket.expect(self._backward_passes)
        started = self._on_full(bucket)
        if started is not None:
            self._under_way.append(started)

    def _collect(self, parameter: Tensor) -> None:
        """Collect a parameter's gradient after its accumulation."""
        bucket, view = self._places[parameter]
        assert parameter.grad is not None
        if parameter.grad.data_ptr() != view.data_ptr():  # the first gradient after zero_grad()
            bucket.prepare()
            view.copy_(parameter.grad)
            parameter.grad = view
        bucket.expected[parameter] -= 1
        bucket.missing -= bucket.expected[parameter] == 0
        # Report in order: if a rank fills bucket 1 first, it waits for bucket 0, so that all ranks' messages match.
        all_handed_over = self._rounds * len(self._buckets)
        while self._handed_over < all_handed_over and self._next_bucket().missing == 0:
            self._hand_over()

    def _next_bucket(self) -> Bucket:
        return self._buckets[self._handed_over % len(self._buckets)]


def weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a hook that calls a method as long as its object exists.

    Python's garbage collector does not see the references of torch's hooks. If a hook referred to buckets, whose
    parameters have that hook, neither the buckets nor their memory would ever be freed.
    """
    found = weakref.WeakMethod(method)

    def call(parameter: Tensor) -> None:
        alive = found()
        if alive is not None:
            alive(parameter)

    return call


def split_into_buckets(
    parameters: Iterable[TensorT], over: Axis, bucket_bytes: int = BUCKET_BYTES
) -> list[tuple[list[TensorT], Axis]]:
    """Return buckets of parameters of one dtype and device, with the ranks along `over` that hold the same part.

    A bucket is closed at `bucket_bytes`. Frozen parameters are left out. The order is by each bucket's last parameter.
    """
    numbers = {parameter: number for number, parameter in enumerate(parameters) if parameter.requires_grad}
    buckets: list[tuple[list[TensorT], Axis]] = []
    latest: dict[Hashable, list[TensorT]] = {}  # the open bucket, by the properties that its parameters share
    for parameter in numbers:
        axis = holders(parameter, over)
        kind = parameter.dtype, parameter.device, axis.names
        if kind not in latest or sum(p.nbytes for p in latest[kind]) >= bucket_bytes:
            latest[kind] = []
            buckets.append((latest[kind], axis))
        latest[kind].append(parameter)
    return sorted(buckets, key=lambda bucket: numbers[bucket[0][-1]])


class MyDP(nn.Module):
    """Wraps a model so that its backward pass averages the gradients over all ranks, as DistributedDataParallel does.

    All ranks must have built the same model (`check_same_model`). They start from rank 0's weights and buffers.
    `loss.backward()` starts to average each bucket as soon as it is full, and returns when all averages have arrived,
    so the training loop of one process needs no change. In memory that the ranks of one host share, they are averaged
    at the end of the pass, not during it. Every backward pass averages: m micro-batches send m times as much as one
    average at the end of the step.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__()
        self.model = model
        broadcast_weights(model)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(weakly(self._finish_after_this_pass))
        self._buckets = GradientBuckets(model.parameters(), on_full=self._average, bucket_bytes=bucket_bytes)
        self._in_backward_pass = False

    def forward(self, data: Tensor, target: Tensor | None = None) -> object:
        self._in_backward_pass = False
        self._buckets.restart()  # the last backward pass may have raised an exception
        return self.model(data) if target is None else self.model(data, target)

    def _average(self, bucket: Bucket) -> dist.Work | None:
        with named(str(bucket), "gradients"):
            return dist.all_reduce(bucket.flat, ReduceOp.AVG, bucket.axis.group, async_op=True)

    def _finish_after_this_pass(self, _: Tensor) -> None:
        """At the first gradient of a backward pass, ask autograd to call `_finish` at the end of the pass."""
        if not self._in_backward_pass:
            self._in_backward_pass = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._buckets.finish()
        self._in_backward_pass = False
