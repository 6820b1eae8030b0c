"""Data parallelism whose ranks shard the tensors that each would otherwise hold whole: ZeRO 1, 2 and 3.

The ranks of `MyDP` all hold the same weights, gradients and optimizer state. Here each rank owns an equal part of them,
its shard, and updates only that (ZeRO: Rajbhandari et al., arXiv 1910.02054; stage 3 corresponds to FSDP: Zhao et al.,
arXiv 2304.11277). An all-reduce is a reduce-scatter and an all-gather: sharding puts the optimizer's step between them.

    sharded        each rank holds for n ranks          sends, of data parallelism's
    optimizer      W + G + O / n                        1
    gradients      W + (G + O) / n, and two buckets     1      (reduced in each backward pass, not only in the last one)
    weights        (W + G + O) / n, and two blocks      1.5    (gathered for the forward, and for the backward pass)

Weights that all passes round to bfloat16 are half as large where they are whole and where they are sent.
A reduce-scatter over gloo also needs memory for the parts it receives: as much as is under way, with "optimizer" up to
G. Schedules that delay weight gradients keep even sharded gradients whole for most of a step.
"""

from collections.abc import Callable, Collection, Hashable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from distlab.axes.grid import Axis, all_ranks
from distlab.axes.placement import own_slice
from distlab.axes.shards import ReplicaShards
from distlab.comm.group import empty, shares
from distlab.comm.pending import Pending
from distlab.parallel.data import Bucket, GradientBuckets, split_into_buckets
from distlab.parallel.flat_parameters import FlatParameters, Gathered, GradientShard, flats_of
from distlab.parallel.options import BUCKET_BYTES, SHARDED_BUCKET_BYTES, Sharded
from distlab.parallel.same_model import broadcast_weights, check_same_model
from distlab.parallel.units import Unit, blocks_in, blocks_of, tensors_with_gradient


class ShardedDP(ReplicaShards):
    """Wraps a model so that its replicas shard its optimizer state, gradients or weights.

        model = ShardedDP(model, "weights")
        optimizer = Adam(model.own_parameters().values())
        for x in data:
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            model.finish_gradients()  # each rank has its shard of the mean gradient
            optimizer.step()  # of its shard of the weights
            model.gather_weights()

    All replicas must have built the same model (`check_same_model`). They start from the weights and buffers of the
    first replica. Gradients are averaged over the ranks. Tied parameters count once. Frozen parameters are sharded only
    with "weights", and never updated. The shards of a model in bfloat16 or float16 are kept and updated in float32
    (master weights: Micikevicius et al., arXiv 1710.03740).

    With "weights", a block's parameters are whole only around its forward and its backward pass; at other times their
    values are NaN. A block is a module in an outermost `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`. The modules
    outside of them also count as blocks: neighbors as one. Parameters that several blocks use are gathered for the
    whole pass. A parameter may take no part in a micro-batch if it takes no part in that micro-batch on all ranks.

    Args:
        model: used unchanged for computation; its parameters become views of flat buffers.
        shard: the tensors that the ranks shard: "optimizer": its state; "gradients": also these; "weights": all.
        over: the replicas, by default all ranks; the ranks that hold the same part of a parameter shard that part.
        backward_passes: number per step, each of one micro-batch.
        bucket_bytes: with "optimizer" and "gradients", parameters are sharded and sent in buckets of this size; by
            default as in `GradientBuckets`; a fifth of it for gradients, of which two buckets are whole at once.
        keep: parameters that stay whole on each rank also with "weights", because the script changes them itself.
        rounded: parameters that all passes round to bfloat16, each time before they use them: these are held and
            gathered in bfloat16, which halves their bytes and changes no result. Their shards and gradients keep their
            dtype.
        initial: of a model that was built without weights, a function from a parameter's name to its first value in
            the whole model, so that with "weights" no rank holds more than a block of them. By default, the model has
            them.
    """

    def __init__(
        self,
        model: nn.Module,
        shard: Sharded,
        over: Axis | None = None,
        backward_passes: int = 1,
        bucket_bytes: int | None = None,
        keep: Collection[nn.Parameter] = (),
        rounded: Collection[nn.Parameter] = (),
        initial: Callable[[str], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.shard = model, shard
        over = over or all_ranks("dp")
        bucket_bytes = bucket_bytes or (BUCKET_BYTES if shard == "optimizer" else SHARDED_BUCKET_BYTES)
        self._gathered, whole, rounded = Gathered(), set(keep), set(rounded)
        names = {parameter: name for name, parameter in model.named_parameters()}

        def value_of(parameter: nn.Parameter) -> Tensor:
            return parameter.detach() if initial is None else own_slice(initial(names[parameter]), parameter)

        if initial is None:
            broadcast_weights(model, over)
        else:
            check_same_model(model, over)
            for parameter in whole:
                parameter.data = value_of(parameter).to(parameter)
        make = partial(flats_of, shard=shard, over=over, gathered=self._gathered, rounded=rounded, value_of=value_of)
        if shard == "weights":
            self._units = [Unit(modules, make([p for p in own if p not in whole])) for modules, own in blocks_of(model)]
            together = [unit.flats for unit in self._units]
        else:
            trained = [p for p in model.parameters() if p.requires_grad]
            buckets = split_into_buckets(trained[::-1], over, bucket_bytes)[::-1]
            self._units, together = [], [make(own) for own, _ in buckets]
        self._flats = [*chain.from_iterable(together)]
        in_turn = chain.from_iterable(together[::-1])  # in the order of the backward pass
        filled = [flat.gradients for flat in in_turn if flat.gradients is not None]
        if shard != "optimizer":
            self._share_buffers(filled)
        for index, bucket in enumerate(filled):
            bucket.index = index
        passes, rounds = (backward_passes, 1) if shard == "optimizer" else (1, backward_passes)
        self._buckets = GradientBuckets([], self._reduce, passes, buckets=filled, rounds=rounds)
        self._reducing: Pending | None = None
        self._hook()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the tensors that this rank updates and saves, by the names of the model's parameters.

        A shard is (elements, 1, …), with as many dimensions as its parameter; empty if this rank owns no part of it.
        Frozen parameters that are not sharded are included unchanged.
        """
        shards = {p: own for flat in self._flats for p, own in flat.shards.items()}
        return {name: shards.get(p, p) for name, p in self.model.named_parameters()}

    def finish_gradients(self) -> None:
        """Wait for the mean gradients, and set each shard's `grad`. Call this after the last backward pass."""
        self._buckets.finish()
        self.release_weights()  # those of parameters that took no part in the backward pass
        for flat in self._flats:
            flat.give_gradients()

    def gather_weights(self) -> None:
        """Start to send the shards' new values to all ranks. Call this when shards have changed.

        Until the next forward pass, or `wait_for_weights`, shards may not change again.
        With "weights" nothing is sent: weights that are gathered from now on have the new values.
        """
        self.release_weights()
        for flat in self._flats:
            flat.publish()
            if self.shard != "weights":
                flat.gather()

    def wait_for_weights(self) -> None:
        """Wait until the transfers that `gather_weights` has started have ended."""
        for flat in self._flats:
            flat.arrive()

    def release_weights(self) -> None:
        for unit in self._units:
            unit.release()

    def whole_parameters(self) -> dict[str, Tensor]:
        """Return copies of the weights by name, whole on every rank; all replicas must call it."""
        whole: dict[Tensor, Tensor] = {p: p.detach() for p in self.model.parameters()}
        self.wait_for_weights()
        for flat in self._flats:
            whole |= dict(zip(flat.parameters, flat.whole(), strict=True))
        return {name: whole[p] for name, p in self.model.named_parameters()}

    def flat_weights(self) -> list[Tensor]:
        """Return the buffers of which the model's parameters are views."""
        return [flat.flat for flat in self._flats]

    def held_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of weights and of gradients that this rank holds, and the bytes that it held temporarily.

        The last number is for blocks or buckets that are whole while they are needed: the peak so far.
        """
        sharded = {p for flat in self._flats for p in flat.parameters}
        replicated_bytes = sum(p.nbytes for p in self.model.parameters() if p not in sharded)
        weight_bytes = replicated_bytes + sum(flat.weight_bytes for flat in self._flats)
        gradient_bytes = sum(flat.gradients.held_bytes for flat in self._flats if flat.gradients is not None)
        return weight_bytes, gradient_bytes, self._gathered.peak_bytes

    def _share_buffers(self, buckets: "Iterable[GradientShard]") -> None:
        """Make buckets of one dtype, device and axis take turns with a buffer in shared memory, if there is any."""
        alike: dict[Hashable, list[GradientShard]] = {}
        for bucket in buckets:
            alike.setdefault((bucket.flat.dtype, bucket.flat.device, bucket.axis.names), []).append(bucket)
        for some in alike.values():
            longest = max(some, key=lambda bucket: len(bucket.flat))
            buffer = empty(len(longest.flat), longest.flat, longest.axis.group)
            if shares(buffer, longest.axis.group):
                self._gathered.count(buffer.nbytes)
                for bucket in some:
                    bucket.send_from(buffer)

    def _reduce(self, bucket: Bucket) -> Pending:
        """Start to add up a bucket's gradients; if gradients are sharded, at most two buckets are whole at once."""
        assert isinstance(bucket, GradientShard)
        if self._reducing is not None and self.shard != "optimizer":
            self._reducing.wait()
        self._reducing = bucket.reduce()
        return self._reducing

    def _hook(self) -> None:
        """Make each module gather its weights, and free them."""
        if self.shard != "weights":
            flat_of = {p: flat for flat in self._flats for p in flat.parameters}
            in_blocks: set[nn.Parameter] = set()
            for block in blocks_in(self.model):
                in_blocks |= set(block.parameters())
                _before(block, {flat_of[p]: None for p in block.parameters() if p in flat_of})
            others = [p for p in self.model.parameters() if p not in in_blocks]
            _before(self.model, {flat_of[p]: None for p in others if p in flat_of})
            return
        in_turn = [unit for unit in self._units if unit.modules != [self.model]]
        for unit in self._units:
            at = in_turn.index(unit) if unit in in_turn else None
            before = in_turn[at - 1] if at else None
            unit.hook(before, None if at is None else next(iter(in_turn[at + 1 :]), None))
        self.model.register_forward_hook(self._end_of_forward)

    def _end_of_forward(self, _: nn.Module, args: object, output: object) -> None:
        self.release_weights()
        if torch.is_grad_enabled() and any(True for _ in tensors_with_gradient(output)):
            self._units[-1].gather()  # the first that the backward pass needs


def _before(module: nn.Module, flats: Iterable[FlatParameters]) -> None:
    """Wait for some weights before a module's forward pass."""
    flats = tuple(flats)

    def arrive(_: nn.Module, args: object) -> None:
        for flat in flats:
            flat.arrive()

    module.register_forward_pre_hook(arrive)
