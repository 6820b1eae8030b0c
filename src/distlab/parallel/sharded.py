"""Data parallelism whose ranks share out what each of them would hold whole: ZeRO 1, 2 and 3.

The ranks of `MyDP` all hold the same weights, gradients and optimizer state. Here each rank owns an equal part of them,
its shard, and updates that alone (ZeRO: Rajbhandari et al., arXiv 1910.02054; stage 3 is what FSDP does: Zhao et al.,
arXiv 2304.11277). An all-reduce is a reduce-scatter and an all-gather: sharding puts the optimizer's step between them.

    shared out     each rank holds for n ranks          sends, of data parallelism's
    optimizer      W + G + O / n                        1
    gradients      W + (G + O) / n, and two buckets     1      (reduced in each backward pass, not only in the last one)
    weights        (W + G + O) / n, and two blocks      1.5    (gathered for the forward, and for the backward pass)

A reduce-scatter over gloo also needs memory for what it receives: as much as is under way, with "optimizer" up to G.
Schedules that delay weight gradients keep gradients whole, for most of a step, also where they are shared out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.comm.endpoint import members, rank
from distlab.comm.torch_patches import running_backward_pass
from distlab.comm.traffic import Group, traffic
from distlab.comm.transfer import Pending, Transfer
from distlab.parallel.data import (
    BUCKET_BYTES,
    Bucket,
    GradientBuckets,
    broadcast_weights,
    elements_of,
    split_into_buckets,
    views_of,
)
from distlab.parallel.division import Sharded

HALF = (torch.bfloat16, torch.float16)  # dtypes whose shards are updated in float32


class ShardedDP(nn.Module):
    """Wraps a model so that the ranks of a group share out its optimizer state, gradients or weights.

        model = ShardedDP(model, "weights")
        optimizer = Adam(model.own_parameters().values())
        for x in data:
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            model.finish_gradients()  # each rank has its shard of the mean gradient
            optimizer.step()  # of its shard of the weights
            model.gather_weights()

    All ranks start from the weights and buffers of the group's first rank. Gradients are averaged over the ranks. Tied
    parameters count once. Frozen ones are shared out with "weights" only, and never updated. The shards of a model in
    bfloat16 or float16 are kept and updated in float32 (master weights: Micikevicius et al., arXiv 1710.03740).

    With "weights", a block's parameters are whole only around its forward and its backward pass; at other times their
    values are NaN. A block is a module in an outermost `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`. The modules
    outside of them count as blocks, too: neighbours as one. What several blocks use is gathered for the whole pass.
    A parameter may take no part in a micro-batch, if it takes none in that micro-batch of all ranks.

    Args:
        model: computed with as it is; its parameters become views of flat buffers.
        shard: what the ranks share out: "optimizer" its state; "gradients" these, too; "weights" all.
        group: the replicas; by default, all ranks.
        backward_passes: of a step, each of one micro-batch.
        bucket_bytes: with "optimizer" and "gradients", parameters are sharded and sent in buckets of this size; by
            default that of `GradientBuckets`; a fifth of it for gradients, of which two buckets are whole at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        shard: Sharded,
        group: Group = None,
        backward_passes: int = 1,
        bucket_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.model, self.shard, self.group = model, shard, group
        bucket_bytes = bucket_bytes or (BUCKET_BYTES if shard == "optimizer" else BUCKET_BYTES // 5)
        broadcast_weights(model, group)
        self.held = Held()
        if shard == "weights":
            self._units = [Unit(modules, parameters) for modules, parameters in blocks_of(model)]
        else:
            trained = [p for p in model.parameters() if p.requires_grad]
            buckets = split_into_buckets(trained[::-1], bucket_bytes)
            self._units = [Unit([], parameters) for parameters in buckets][::-1]
        for unit in self._units:
            unit.share_out(shard, group, self.held)
        flats = [flat for unit in self._units[::-1] for flat in unit.flats]
        if shard != "optimizer":
            self._share_buffers([flat.bucket for flat in flats if flat.bucket is not None])
        filled = [flat.bucket for flat in flats if flat.bucket is not None]  # in the order of the backward pass
        for index, bucket in enumerate(filled):
            bucket.index = index
        passes, rounds = (backward_passes, 1) if shard == "optimizer" else (1, backward_passes)
        self._buckets = GradientBuckets([], self._reduce, passes, buckets=filled, rounds=rounds)
        self._reducing: Reduction | None = None
        self._hook()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """What this rank updates and saves, by the names of the model's parameters.

        A shard is (elements, 1, …), with as many dimensions as its parameter; that of which this rank owns nothing is
        empty. Frozen parameters that are not shared out are here as they are.
        """
        shards = {id(p): own for unit in self._units for flat in unit.flats for p, own in flat.own_parameters()}
        return {name: shards.get(id(p), p) for name, p in self.model.named_parameters()}

    def finish_gradients(self) -> None:
        """Wait for the mean gradients: each shard's `grad` is there. To be called after the last backward pass."""
        self._buckets.finish()
        self._reducing = None
        for unit in self._units:
            unit.release()  # of what took no part in the backward pass
            for flat in unit.flats:
                flat.give_gradients()

    def gather_weights(self) -> None:
        """Start to tell all ranks the shards' new values. To be called when shards have changed.

        Until the next forward pass, or `wait_for_weights`, shards may not change again.
        With "weights" nothing is sent: what is gathered from now on has the new values.
        """
        for unit in self._units:
            unit.release()
            unit.publish()
            if self.shard != "weights":
                unit.gather()

    def wait_for_weights(self) -> None:
        """Return when what `gather_weights` has started has ended."""
        for unit in self._units:
            unit.arrive()

    def whole_parameters(self) -> dict[str, Tensor]:
        """Copies of the weights by name, whole on every rank; all ranks of the group must call it."""
        whole: dict[int, Tensor] = {id(p): p.detach() for p in self.model.parameters()}
        for unit in self._units:
            unit.gather()
            unit.arrive()
            whole |= {id(p): p.detach().clone() for flat in unit.flats for p in flat.parameters}
            unit.release()
        return {name: whole[id(p)] for name, p in self.model.named_parameters()}

    def flat_weights(self) -> list[Tensor]:
        """The buffers of which the model's parameters are views."""
        return [flat.flat for unit in self._units for flat in unit.flats]

    def held_bytes(self) -> tuple[int, int, int]:
        """Bytes of the weights and of the gradients that this rank holds, and of those that it held for a while.

        The last are blocks or buckets that are whole while they are needed: at the peak so far.
        """
        flats = [flat for unit in self._units for flat in unit.flats]
        shared_out = {p for flat in flats for p in flat.parameters}
        replicated_bytes = sum(p.nbytes for p in self.model.parameters() if p not in shared_out)
        weight_bytes = replicated_bytes + sum(flat.weight_bytes for flat in flats)
        return weight_bytes, sum(flat.gradient_bytes for flat in flats), self.held.peak_bytes

    def _share_buffers(self, buckets: "Iterable[ShardedBucket]") -> None:
        """Have buckets of one dtype and device take turns with a buffer in shared memory, where there is any."""
        largest: dict[tuple[torch.dtype, torch.device], ShardedBucket] = {}
        for bucket in (buckets := list(buckets)):
            kind = bucket.flat.dtype, bucket.flat.device
            largest[kind] = max(largest.get(kind, bucket), bucket, key=lambda b: len(b.flat))
        for kind, longest in largest.items():
            buffer = traffic.new_buffer(len(longest.flat), longest.flat, self.group)
            if traffic.is_shared(buffer, self.group):
                self.held.hold(buffer.nbytes)
                for bucket in buckets:
                    if (bucket.flat.dtype, bucket.flat.device) == kind:
                        bucket.send_from(buffer)

    def _reduce(self, bucket: Bucket) -> Pending:
        """Start to add up a bucket's gradients; with shared-out gradients, no more than two are whole at a time."""
        assert isinstance(bucket, ShardedBucket)
        if self._reducing is not None and self.shard != "optimizer":
            self._reducing.wait()
        self._reducing = bucket.reduce()
        return self._reducing

    def _hook(self) -> None:
        """Have each module find its weights, and let go of them."""
        if self.shard != "weights":
            unit_of = {p: unit for unit in self._units for flat in unit.flats for p in flat.parameters}
            in_blocks: set[nn.Parameter] = set()
            for block in _blocks(self.model):
                in_blocks |= set(block.parameters())
                _before(block, {unit_of[p]: None for p in block.parameters() if p in unit_of})
            others = [p for p in self.model.parameters() if p not in in_blocks]
            _before(self.model, {unit_of[p]: None for p in others if p in unit_of})
            return
        in_turn = [unit for unit in self._units if unit.modules != [self.model]]
        for unit in self._units:
            at = in_turn.index(unit) if unit in in_turn else None
            before = in_turn[at - 1] if at else None
            unit.hook(before, None if at is None else next(iter(in_turn[at + 1 :]), None))
        self.model.register_forward_hook(self._end_of_forward)

    def _end_of_forward(self, _: nn.Module, args: object, output: object) -> None:
        for unit in self._units:
            unit.release()
        if torch.is_grad_enabled() and any(True for _ in _tensors_with_gradient(output)):
            self._units[-1].gather()  # the first that the backward pass needs


def _before(module: nn.Module, units: "Iterable[Unit]") -> None:
    """Wait for the weights of some units before a module's forward pass."""
    units = tuple(units)

    def arrive(_: nn.Module, args: object) -> None:
        for unit in units:
            unit.arrive()

    module.register_forward_pre_hook(arrive)


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
        """Give a buffer that was let go of its memory again."""
        flat.untyped_storage().resize_(flat.nbytes)
        self.hold(flat.nbytes)

    def free(self, flat: Tensor) -> None:
        """Let go of a buffer's memory, but not of its views."""
        flat.untyped_storage().resize_(0)
        self.hold(-flat.nbytes)


def new_flat(parameters: Sequence[Tensor], group: Group, is_kept: bool = True) -> Tensor:
    """Zeros (elements,) for parameters side by side, filled up to an equal part for each rank of a group.

    If the buffer is kept all the time, it is in memory that these ranks share, if they can.
    """
    ranks, like = len(members(group)), parameters[0].detach()
    elements = -(-elements_of(parameters) // ranks) * ranks
    return traffic.new_buffer(elements, like, group) if is_kept else like.new_zeros(elements)


def is_whole(flat: Tensor) -> bool:
    """Whether a buffer has its memory."""
    return flat.untyped_storage().nbytes() > 0


class FlatParameters:
    """Parameters of one dtype side by side in a flat buffer, of which each rank owns an equal part, its shard.

    The last parts may be filled up with zeros, which are nobody's.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shard: Sharded, group: Group, held: Held) -> None:
        ranks = members(group)
        self.parameters, self._group, self._held = parameters, group, held
        self._shares_weights, self._shares_gradients = shard == "weights", shard != "optimizer"
        self.flat = new_flat(parameters, group, is_kept=not self._shares_weights)
        self._views = views_of(self.flat, parameters)
        for parameter, view in zip(parameters, self._views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.parts = self.flat.view(len(ranks), -1)  # (ranks, elements of a shard)
        self._in_whole = self.parts[ranks.index(rank())]
        self._start = ranks.index(rank()) * len(self._in_whole)
        is_half, is_trained = self.flat.dtype in HALF, parameters[0].requires_grad
        self._to_send = self._in_whole
        if self._shares_weights:
            self._to_send = traffic.new_buffer(len(self._in_whole), self.flat, group).copy_(self._in_whole)
        self.own = self._to_send.float() if is_half and is_trained else self._to_send  # master weights
        self.bucket = ShardedBucket(self, held) if is_trained else None
        self._gradient: Tensor | None = None  # of the shard
        if self.bucket is not None:
            in_place = shard == "optimizer" and not is_half
            self._gradient = self.bucket.own if in_place else torch.zeros_like(self.own)
        self._is_first = True  # nothing has been added to the gradient in this step
        self._arriving: Transfer | None = None
        self._own_parameters = [
            (parameter, _shard_of(parameter, self.own[where.start : where.stop], start))
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
        self._arriving = traffic.all_gather(self.parts, self._to_send, what, kind="weights", group=self._group)

    def arrive(self) -> None:
        """Wait for the weights."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def free(self) -> None:
        """Let go of the other ranks' weights, if this rank does not keep them."""
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


class FlatRange(NamedTuple):
    """Which elements of a parameter a shard is: from `start`, in the order of memory."""

    shape: torch.Size  # of the parameter
    start: int


def _shard_of(parameter: nn.Parameter, own: Tensor, start: int) -> nn.Parameter:
    """This rank's shard of a parameter, which is to be known by its place in it, also if this is split itself."""
    shard = nn.Parameter(own.view(-1, *[1] * (parameter.dim() - 1)), requires_grad=parameter.requires_grad)
    shard.flat_range = FlatRange(parameter.shape, start)  # type: ignore[attr-defined]
    if hasattr(parameter, "shard_spec"):  # see TPGroup.own_parameter
        shard.shard_spec = parameter.shard_spec  # type: ignore[attr-defined]
    return shard


class ShardedBucket(Bucket):
    """The gradients of flat parameters, which the ranks add up so that each gets its shard."""

    def __init__(self, flats: FlatParameters, held: Held) -> None:
        ranks = members(flats._group)
        super().__init__(0, flats.parameters, new_flat(flats.parameters, flats._group, not flats._shares_gradients))
        self._flats, self._held = flats, held
        self._parts = self.flat.view(len(ranks), -1)  # (ranks, elements of a shard)
        self.own = self._parts[ranks.index(rank())]
        self._reduction: Reduction | None = None
        self._buffer: Tensor | None = None  # with shared-out gradients, where they are reduced, if not in `flat`

    def send_from(self, buffer: Tensor) -> None:
        """Copy the gradients to a buffer of several buckets, (elements,), of which one at a time is reduced there."""
        ranks = members(self._flats._group)
        self._buffer = buffer[: len(self.flat)]
        self._parts = self._buffer.view(len(ranks), -1)
        self.own = self._parts[ranks.index(rank())]

    def prepare(self) -> None:
        if self._reduction is not None and self._buffer is None:
            self._reduction.wait()
        if not is_whole(self.flat):
            self._held.allocate(self.flat)

    def reduce(self) -> "Reduction":
        """Start to add up the ranks' gradients."""
        group = self._flats._group
        for parameter in self.parameters:
            parameter.grad = None  # what follows in the next backward pass is a tensor of its own
        if self._buffer is not None:
            self._buffer.copy_(self.flat)
            self._held.free(self.flat)
        self._received_bytes = traffic.received_bytes(self._parts, group)
        self._held.hold(self._received_bytes)
        transfer = traffic.reduce_scatter(self.own, self._parts, str(self), kind="gradients", group=group)
        self._reduction = Reduction(transfer, self._take)
        return self._reduction

    def _take(self) -> None:
        self._reduction = None
        self._held.hold(-self._received_bytes)
        self.own.div_(len(self._parts))
        self._flats.add_gradient(self.own)
        if self._flats._shares_gradients and self._buffer is None:
            self._held.free(self.flat)


class Reduction:
    """A reduce-scatter under way, and what is done at its end."""

    def __init__(self, transfer: Transfer, take: Callable[[], None]) -> None:
        self._transfer, self._take = transfer, take
        self._has_ended = False
        self.do_own_share = transfer.do_own_share

    def wait(self) -> None:
        if not self._has_ended:
            self._transfer.wait()
            self._has_ended = True
            self._take()


class Unit:
    """Parameters that are gathered together: those of a block, or of a bucket."""

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> None:
        self.modules, self._parameters = modules, parameters
        self.flats: list[FlatParameters] = []
        self._name = "the weights"
        self._inputs: list[object] = []  # a token for each input of a forward pass that has a gradient
        self._left: set[object] = set()  # what the backward pass has still to compute with these parameters
        self._backward_pass: int | None = None  # the one that has begun to compute with them

    def share_out(self, shard: Sharded, group: Group, held: Held) -> None:
        def kind(p: nn.Parameter) -> tuple[bool, str, str]:
            return p.requires_grad, str(p.dtype), str(p.device)

        self.flats = [
            FlatParameters([*same], shard, group, held) for _, same in groupby(sorted(self._parameters, key=kind), kind)
        ]

    def publish(self) -> None:
        for flat in self.flats:
            flat.publish()

    def gather(self) -> None:
        for flat in self.flats:
            flat.gather(self._name)

    def arrive(self) -> None:
        for flat in self.flats:
            flat.arrive()

    def release(self) -> None:
        self._inputs, self._backward_pass = [], None
        for flat in self.flats:
            flat.free()

    @property
    def _is_computed_again(self) -> bool:
        """Whether a forward pass is for the activations that the running backward pass of these modules needs."""
        return self._backward_pass is not None and self._backward_pass == running_backward_pass()

    def hook(self, before: "Unit | None", after: "Unit | None") -> None:
        """Gather around the modules' forward and backward passes, with the next unit's weights posted ahead."""

        def start(_: nn.Module, args: object, kwargs: object) -> None:
            self.gather()
            self.arrive()
            if self._is_computed_again:
                return
            if after is not None:
                after.gather()
            if torch.is_grad_enabled() and has_frozen:
                for x in _tensors_with_gradient([args, kwargs]):
                    token = object()
                    self._inputs.append(token)
                    x.register_hook(partial(self._done, token))

        def end(module: nn.Module, args: object, output: object) -> None:
            if self._is_computed_again:
                return
            if torch.is_grad_enabled():
                for y in _tensors_with_gradient(output):
                    y.register_hook(partial(begin_backward, self._inputs))
            if module is self.modules[-1]:
                self.release()

        def begin_backward(inputs: list[object], _: Tensor) -> None:
            self.gather()
            self.arrive()
            if not self._is_computed_again:
                self._backward_pass = running_backward_pass()
                self._left = {*trained, *inputs}
                if before is not None:
                    before.gather()

        trained = [p for p in self._parameters if p.requires_grad]
        has_frozen = len(trained) < len(self._parameters)
        for module in self.modules:
            module.register_forward_pre_hook(start, with_kwargs=True)
            module.register_forward_hook(end)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._done)

    def _done(self, part: object, _: object = None) -> None:
        """The backward pass has computed a parameter's gradient, or, where some are frozen, an input's."""
        self._left.discard(part)
        if self._backward_pass is not None and not self._left:
            self.release()


def blocks_of(model: nn.Module) -> list[tuple[list[nn.Module], list[nn.Parameter]]]:
    """The modules whose parameters are gathered together, in the model's order; first, the model with what it shares.

    Those are the parameters that several of the others use, or that belong to a module with modules inside.
    """
    groups: list[list[nn.Module]] = [[]]

    def walk(module: nn.Module) -> None:
        children = list(module.children())
        if not children and module is not model:
            groups[-1].append(module)
        for child in children:
            if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                groups.extend([[child], []])
            else:
                walk(child)

    walk(model)
    users = Counter(p for group in groups for p in {p for module in group for p in module.parameters()})
    shared = [p for p in model.parameters() if users[p] != 1]
    blocks = [([model], shared)]
    for group in groups:
        with_own = [module for module in group if any(users[p] == 1 for p in module.parameters())]
        blocks.append((with_own, [p for module in with_own for p in module.parameters() if users[p] == 1]))
    return [(modules, parameters) for modules, parameters in blocks if parameters]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in the outermost lists of modules."""
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield child
        else:
            yield from _blocks(child)


def _tensors_with_gradient(value: object) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries that a backward pass goes through."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors_with_gradient(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors_with_gradient(part)
