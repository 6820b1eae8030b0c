"""The costs of each action of a layout on a machine: seconds, and bytes of activations."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from distlab.pipeline.actions import Action, ActionCosts
from distlab.pipeline.split import PartCosts, Split, balance, estimated_costs
from distlab_planner.layouts import RunLayout
from distlab_planner.machine import Machine, Measured, PassKind, interpolate
from distlab_planner.model import ID_BYTES, NUMBER_BYTES, Model, ModelPart, share
from distlab_planner.sequences import SharedAttention
from distlab_planner.traffic import RankGroup, RanksOnHosts

SHARDED_BUCKET_BYTES = 5_000_000  # `BUCKET_BYTES // 5` of `distlab.parallel.sharded`
# By an action's letter, the pass whose time it takes.
KIND_OF: dict[str, PassKind] = {"F": "F", "B": "B", "I": "I", "W": "W", "f": "F", "R": "F", "b": "B", "i": "I"}
SHARE_OF = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # of a forward pass's multiply-adds


@dataclass(frozen=True)
class Kept:
    """Bytes of a micro-batch that a stage keeps."""

    all: int  # needed by a backward pass
    by_forward: int  # kept by a forward pass: with its output, without recomputed tensors
    input: int  # kept by a forward pass that keeps only its input
    factors: int  # between `BackwardInput` and `BackwardWeight`


@dataclass(frozen=True)
class Costs:
    """The costs of a layout's actions.

    If replicas shard the weights, the collectives of a pass are part of it.
    """

    machine: Machine
    model: Model
    layout: RunLayout
    threads: int | None = None  # of every rank, by `OMP_NUM_THREADS`; by default, its share of the cores
    optimizer: str = "adam"  # or "adamw", "sgd"
    casts_messages: bool = True  # whether stages exchange activations in the dtype in which they compute

    @functools.cached_property
    def on_hosts(self) -> RanksOnHosts:
        return RanksOnHosts(self.machine, self.layout)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.layout.rows * self.attention.positions

    @functools.cached_property
    def attention(self) -> SharedAttention:
        """The attention of one block, as the ranks share it."""
        own = self.layout
        sizes = self.model.sizes
        return SharedAttention(sizes, own.rows, own.size("cp"), own.cp_kind, own.cp_order, own.size("tp"))

    def parts(self, stage: int) -> dict[ModelPart, int]:
        """Return how many of each part of the model a stage holds."""
        split = self.layout.split
        return {"embedding": int(stage == 0), "block": split[stage], "head": int(stage == len(split) - 1)}

    def weights(self, stage: int) -> int:
        """Return the number of weights of a stage, on one rank."""
        return sum(count for count, _ in self.weights_by_holders(stage))

    def weights_by_holders(self, *stages: int) -> tuple[tuple[int, RankGroup], tuple[int, RankGroup]]:
        """Return the numbers of weights of stages, without experts and of experts, each with the ranks that hold it."""
        sizes, tp, counts = self.model.sizes, self.layout.size("tp"), [self.parts(stage) for stage in stages]
        others = sum(count * sizes.weights(part, tp) for parts in counts for part, count in parts.items())
        experts = sum(parts["block"] for parts in counts) * sizes.expert_weights(self.layout.size("ep"))
        return (others, self.on_hosts.replicas), (experts, self.on_hosts.expert_holders)

    def rounded_by_holders(self, *stages: int) -> tuple[tuple[int, RankGroup], tuple[int, RankGroup]]:
        """Return how many of the weights by holders a pass rounds before it uses them."""
        sizes, tp, (_, (experts, holders)) = self.model.sizes, self.layout.size("tp"), self.weights_by_holders(*stages)
        parts = [(part, count) for stage in stages for part, count in self.parts(stage).items()]
        others = sum(count * sizes.rounded_weights(part, tp) for part, count in parts)
        return (others, self.on_hosts.replicas), (experts * (sizes.dtype != "float32"), holders)

    def gathered_by_holders(self, *stages: int) -> tuple[tuple[int, RankGroup], tuple[int, RankGroup]]:
        """Return the bytes of the weights by holders as these gather them, if they shard weights or updates."""
        saved = NUMBER_BYTES - self.model.sizes.inner_bytes
        both = zip(self.weights_by_holders(*stages), self.rounded_by_holders(*stages), strict=True)
        others, experts = ((n * NUMBER_BYTES - rounded * saved, holders) for (n, holders), (rounded, _) in both)
        return others, experts

    def own_weights(self, *stages: int) -> int:
        """Return the number of weights that a rank updates if their holders shard them."""
        return sum(share(count, holders.size) for count, holders in self.weights_by_holders(*stages))

    def own_rounded(self, *stages: int) -> int:
        """Return how many of these a pass rounds before it uses them."""
        return sum(share(count, holders.size) for count, holders in self.rounded_by_holders(*stages))

    @functools.cached_property
    def activation_bytes(self) -> int:
        """Bytes of a micro-batch's activations between two blocks."""
        return self.tokens * self.model.sizes.dmodel * NUMBER_BYTES

    @property
    def message_bytes(self) -> int:
        """Bytes of the same in the dtype of products: between slices that add them up."""
        return self.tokens * self.model.sizes.dmodel * self.model.sizes.inner_bytes

    @property
    def stage_message_bytes(self) -> int:
        """Bytes of the same on the way to the next stage."""
        return self.message_bytes if self.casts_messages else self.activation_bytes

    def seconds(self, action: Action, threads: int = 1) -> float:
        """Return the seconds of an action that no other rank slows down, including the collectives inside it."""
        if action.letter not in KIND_OF:
            return action.seconds(self._action_costs(threads))
        return self.pass_seconds(action.letter, action.stage, threads, self._computes_blocks_again(action))

    @functools.cached_property
    def _action_costs(self) -> Callable[[int], ActionCosts]:
        """A function from threads to the costs from which other kinds of actions compute their times."""
        stages, again = range(len(self.layout.split)), self.layout.recomputes_blocks

        def of_threads(threads: int) -> ActionCosts:
            forward, whole, inputs, weights = (
                [self.pass_seconds(kind, stage, threads, again and kind in "BI") for stage in stages] for kind in "FBIW"
            )
            kept = [self._kept(stage) for stage in stages]
            return ActionCosts(
                forward,
                whole,
                activation_bytes=[one.by_forward for one in kept],
                weight_share=[weight / (weight + other) for weight, other in zip(weights, inputs, strict=True)],
                weight_bytes_share=[one.factors / one.by_forward for one in kept],
                input_bytes_share=[one.input / one.by_forward for one in kept],
            )

        return functools.cache(of_threads)

    @functools.cached_property
    def pass_seconds(self) -> Callable[[str, int, int, bool], float]:
        """A function (letter of an action, stage, threads, whether blocks are computed again) -> seconds."""
        return functools.cache(self._pass_seconds)

    def _pass_seconds(self, letter: str, stage: int, threads: int, again: bool) -> float:
        seconds = self._pass(KIND_OF[letter], stage, threads) + self._exchanged(letter, stage, again)
        if again:
            seconds += self.parts(stage)["block"] * self._block_again(threads)
        return seconds

    def exchanged(self, action: Action) -> float:
        """Return an action's seconds in collectives, if no other rank computes; unknown for new kinds of actions."""
        return self._exchanged(action.letter, action.stage, self._computes_blocks_again(action))

    def _computes_blocks_again(self, action: Action) -> bool:
        """Return whether a backward pass computes blocks again.

        Their last product, which only the output needs, is left out; the bookkeeping takes up the saved time.
        """
        return action.letter in "bi" or (action.letter in "BI" and self.layout.recomputes_blocks)

    def _pass(self, kind: PassKind, stage: int, threads: int) -> float:
        own = sum(count * self._of_part(part, kind, threads) for part, count in self.parts(stage).items() if count)
        return own if self._measured else own + self.machine.pass_seconds

    def _of_part(self, part: ModelPart, kind: PassKind, threads: int) -> float:
        sizes, tp = self.model.sizes, self.layout.size("tp")
        if self._measured:
            own, products = self._with_threads(threads, lambda entry: entry.seconds(part, kind, self._rows)), 0.0
        else:
            own, products = 0.0, sizes.multiply_adds(part, tp)
        if part == "block":
            products += (self.attention.work - 1) * sizes.attention_multiply_adds(tp)
        return own + self.tokens * products * SHARE_OF[kind] / self._speed / threads

    @property
    def _speed(self) -> float:
        return self.machine.speed(self.model.sizes.dtype, self.model.sizes.compiled)

    @property
    def _rows(self) -> float:
        """Sequences of the length that was measured with as much work as this rank's positions of a micro-batch.

        Where the ranks share the pairs of queries and keys equally, a rank has the work of a part of each sequence.
        """
        return self.tokens / self.model.sizes.seq_len

    def _block_again(self, threads: int) -> float:
        """Return the additional seconds of a backward pass that computes a block again."""
        if self._measured:
            seconds = self._with_threads(threads, lambda entry: entry.again_seconds(self._rows))
        else:
            seconds = self._of_part("block", "F", threads)
        if self._keeps_attention:
            sizes, tp = self.model.sizes, self.layout.size("tp")
            seconds *= 1 - sizes.attention_multiply_adds(tp) / sizes.multiply_adds("block", tp)
        return seconds

    @property
    def _keeps_attention(self) -> bool:
        return self.layout.recompute == "except-attention"

    def _with_threads(self, threads: int, seconds_of: Callable[[Measured], float]) -> float:
        """Return measured seconds, converted to `threads` threads.

        Linear in each thread's share of the work; more threads than were measured divide it further.
        """
        shares, each = [1 / entry.threads for entry in self._measured], [seconds_of(entry) for entry in self._measured]
        share = 1 / threads
        seconds = interpolate(share, shares, each) if share > shares[0] else each[0] * share / shares[0]
        # Measured while these threads slowed each other, like ranks.
        return seconds / self.machine.slowdown_of(min(threads, self.machine.cores_per_host))

    @functools.cached_property
    def _measured(self) -> list[Measured]:
        """Measurements of this model with these slices, by descending number of threads."""
        found = self.machine.measured_for(self.model.sizes, self.layout.size("tp"))
        return sorted({entry.threads: entry for entry in found}.values(), key=lambda entry: -entry.threads)

    @functools.cached_property
    def _all_reduce_activations(self) -> float:
        """Seconds in which the slices of a stage add up activations, or their gradients."""
        return self.on_hosts.all_reduce(self.on_hosts.slices, self.message_bytes, "shared").alone

    def _exchanges(self, letter: str, stage: int, again: bool) -> int:
        kind = KIND_OF[letter]
        if self.layout.size("tp") == 1 or kind == "W":
            return 0
        parts = self.parts(stage)
        in_float32 = NUMBER_BYTES // self.model.sizes.inner_bytes * parts["embedding"]  # its slices add up in it
        outside = in_float32 if kind == "F" else parts["head"]
        if self.model.sizes.experts:  # each slice computes them all, so that they add up attention's products only
            return (1 + again) * parts["block"] + outside
        needs_no_output = letter == "R" and not parts["head"]  # so the last of them is left out
        return (2 + again) * parts["block"] + outside - needs_no_output

    def _exchanged(self, letter: str, stage: int, again: bool) -> float:
        kind = KIND_OF.get(letter)
        if kind is None:
            return 0.0
        seconds = self._exchanges(letter, stage, again) * self._all_reduce_activations
        if kind == "F" and self.parts(stage)["head"]:  # the loss: the largest logit of each token; two sums
            sizes = (self.tokens * NUMBER_BYTES, 2 * self.tokens * NUMBER_BYTES)
            seconds += sum(self.on_hosts.all_reduce(self.on_hosts.slices, size, "shared").alone for size in sizes)
        if self.layout.size("ep") > 1 and kind != "W":  # a row for each expert of a token, there and back
            count = 2 * (1 + (again and kind != "F")) * self.parts(stage)["block"]
            row_bytes = self.message_bytes * self.model.sizes.experts_per_token
            seconds += count * self.on_hosts.all_to_all(self.on_hosts.sharing_experts, row_bytes).alone
        return seconds + self._gathered(kind, stage) + self._sequence_seconds(kind, stage, again)

    def shared_bytes(self, action: Action) -> float:
        """Return the bytes that a rank sends in an action to those with which it shares sequences."""
        kind, again = KIND_OF.get(action.letter), self._computes_blocks_again(action)
        return sum(count * size_bytes for count, size_bytes in self._sequence_messages(kind, action.stage, again))

    def _sequence_messages(self, kind: PassKind | None, stage: int, again: bool) -> list[tuple[int, float]]:
        """Return the messages of a pass to the ranks with which a rank shares sequences: their number, and size."""
        attention, blocks = self.attention, self.parts(stage)["block"]
        if kind in ("W", None) or not blocks or attention.ranks == 1:
            return []
        goes_forward = kind == "F" or (again and not self._keeps_attention)
        messages = [attention.forward] * goes_forward + [attention.backward] * (kind != "F")
        return [(blocks * count, size_bytes) for count, size_bytes in messages]

    def ring_seconds(self, action: Action) -> float:
        """Return the part of `exchanged` that rings of keys and values take: messages, not collectives."""
        kind = KIND_OF.get(action.letter)
        if kind is None or self.layout.cp_kind != "ring":
            return 0.0
        return self._sequence_seconds(kind, action.stage, self._computes_blocks_again(action))

    def _sequence_seconds(self, kind: PassKind, stage: int, again: bool) -> float:
        """Return the seconds that ranks which share sequences add to a pass, each message after the one before it."""
        messages, hosts = self._sequence_messages(kind, stage, again), self.on_hosts
        seconds = sum(count * hosts.message_in_ring(hosts.parts, size_bytes) for count, size_bytes in messages)
        return max(0.0, seconds - self._pass(kind, stage, 1)) if self.machine.device == "cuda" else seconds

    def _gathered(self, kind: PassKind, stage: int) -> float:
        """Return the seconds that sharded weights and gradients add to a pass."""
        shard = self.layout.shard
        if shard not in ("gradients", "weights") or kind == "W":
            return 0.0
        seconds, parts_with = 0.0, (sum(self.parts(stage).values()), self.parts(stage)["block"])
        both = zip(self.weights_by_holders(stage), self.gathered_by_holders(stage), parts_with, strict=True)
        for (count, holders), (gathered_bytes, _), in_model in both:
            size_bytes = count * NUMBER_BYTES
            # With sharded weights, each part of the model has its own collectives.
            parts = in_model if shard == "weights" else max(1, size_bytes // SHARDED_BUCKET_BYTES)
            for sent_bytes in [gathered_bytes] * (shard == "weights") + [size_bytes] * (kind != "F"):
                if sent_bytes:
                    seconds += parts * self.on_hosts.half(holders, sent_bytes / parts, "shared").alone
        # Hidden behind the computation only on GPUs: on CPUs, sending needs the cores.
        return max(0.0, seconds - self._pass(kind, stage, 1)) if self.machine.device == "cuda" else seconds

    def kept_bytes(self, action: Action) -> int:
        """Return the bytes of activations that an action adds to those kept on its worker; negative if it frees them.

        They do not include the ids of the batch and the tables that all blocks of a process share.
        """
        letter, stage = action.letter, action.stage
        if letter not in KIND_OF:
            return round(self._action_costs(1).kept_bytes(action))
        kept = self._kept(stage)
        if letter in "FfRW":
            return {"F": kept.by_forward, "f": kept.input, "R": kept.all - kept.input, "W": -kept.factors}[letter]
        before = kept.all if self._follows_recompute(action) else kept.by_forward
        return (kept.factors if letter in "Ii" else 0) - before

    def _follows_recompute(self, action: Action) -> bool:
        """Return whether a separate action has computed the activations of a backward pass again."""
        return action.letter in "BI" and self.layout.recompute == "all"

    @functools.cached_property
    def _kept(self) -> Callable[[int], Kept]:
        return functools.cache(self._kept_of_stage)

    def _kept_of_stage(self, stage: int) -> Kept:
        parts, sizes, tp, tokens = self.parts(stage), self.model.sizes, self.layout.size("tp"), self.tokens
        factors = sum(count * sizes.factor_bytes(part, tokens, tp) for part, count in parts.items())
        everything = sum(count * self._kept_by(part) for part, count in parts.items())
        mask = self.attention.mask_bytes if parts["block"] else 0
        everything += parts["block"] * self.attention.kept_bytes + mask
        ids = tokens * ID_BYTES if parts["embedding"] else 0
        if self.layout.size("cp") > 1:  # else the ids are views of the batch, and the tables those of all micro-batches
            everything += ids + (self.attention.table_bytes if parts["block"] else 0)
        by_forward = everything + (0 if parts["head"] else self.activation_bytes)  # the output
        if self.layout.recompute != "none":
            by_forward -= parts["block"] * (self._inside_block_bytes - self._kept_attention_bytes)
            by_forward -= mask * (not self._keeps_attention)
        if self.layout.recompute == "all" and parts["head"]:
            by_forward -= tokens * (NUMBER_BYTES + sizes.dmodel * sizes.inner_bytes)  # the norm keeps its input only
        input_bytes = self.activation_bytes
        if parts["embedding"]:
            input_bytes = ids if self.layout.size("cp") > 1 else 0
        return Kept(everything, by_forward, input_bytes, factors)

    def _kept_by(self, part: ModelPart) -> int:
        """Return the bytes that a forward pass of a part keeps; ranks that shard hold rounded weights in bfloat16."""
        sizes = self.model.sizes
        casts = sizes.cast_bytes(part) if self.layout.shard == "none" else 0
        return sizes.kept_bytes(part, self.tokens, self.layout.size("tp")) + casts

    @property
    def _inside_block_bytes(self) -> int:
        """Bytes that a block keeps in addition to its input."""
        return self._kept_by("block") - self.activation_bytes + self.attention.kept_bytes

    @property
    def _kept_attention_bytes(self) -> int:
        """Bytes of attention that a block keeps if it is computed again except for them."""
        own = self.model.sizes.attention_output_bytes(self.tokens, self.layout.size("tp")) + self.attention.kept_bytes
        return own * self._keeps_attention

    def recomputed_bytes(self, action: Action) -> int:
        """Return the additional bytes that a backward pass keeps while it runs, if activations are computed again."""
        blocks, has_head = self.parts(action.stage)["block"], self.parts(action.stage)["head"]
        if action.letter == "I" and self._follows_recompute(action) and not has_head:
            return self.message_bytes  # the gradient of the output, a factor; the output itself is not kept
        if not self._computes_blocks_again(action) or not blocks:
            return 0
        sizes, tokens, tp = self.model.sizes, self.tokens, self.layout.size("tp")
        is_split, kept = action.letter in "Ii", 0
        factors = [sizes.factor_bytes(part, tokens, tp) * is_split for part in ("block", "head")]
        for done in (0, blocks - 1):
            others = (blocks - done) * self.activation_bytes + done * factors[0]
            others += (blocks - done - 1) * self._kept_attention_bytes
            others += self.message_bytes * is_split  # the gradient of the block's output, a factor
            others += self.attention.mask_bytes
            kept = max(kept, others + self._inside_block_bytes + factors[1] * has_head)
        return max(0, kept - self._kept(action.stage).by_forward)

    def balanced_split(self) -> Split:
        """Return the layers of each stage, such that the slowest stage is as fast as possible on this machine."""
        seconds = {part: sum(self._of_part(part, kind, 1) for kind in ("F", "B")) for part in self.parts(0)}
        parts = PartCosts(seconds["block"], seconds["embedding"], seconds["head"])
        return _balance(self.model.n_layers, len(self.layout.split), parts)

    @functools.cached_property
    def estimated(self) -> ActionCosts:
        """The estimates from which a run derives the threads of its actions."""
        parts, again = self.model.sizes.parts, self.layout.recomputes_blocks
        return estimated_costs(self.layout.split, parts, again, self.tokens, self.layout.size("tp"))


_balance = functools.lru_cache(maxsize=4096)(balance)
