"""The costs of each action of a layout on a machine: seconds, and bytes of activations."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distlab.axes.layout import Layout, layout_size
from distlab.comm.link import Link
from distlab.parallel.options import SHARDED_BUCKET_BYTES
from distlab.pipeline.actions import Action, ActionCosts
from distlab.pipeline.split import PartCosts, Split, balance, estimated_costs
from distlab_planner.activations import Activations
from distlab_planner.communication_seconds import RanksOnHosts
from distlab_planner.exchanges import Exchange, in_pass
from distlab_planner.layouts import SAME_EXPERTS, SAME_WEIGHTS, Axes, RunLayout
from distlab_planner.machine import KIND_OF, Device, Machine, Measured, PassKind, interpolate
from distlab_planner.model import NUMBER_BYTES, Model, ModelPart, share

SHARE_OF = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # of a forward pass's multiply-adds


@dataclass(frozen=True)
class Weights:
    """Weights that the same ranks hold, as far as one rank holds them."""

    count: int
    rounded: int  # of these, by each pass, before it uses them
    axes: Axes  # along which ranks hold them
    ranks: int  # that hold them
    rounded_to_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of their gradients."""
        return self.count * NUMBER_BYTES

    @property
    def gathered_bytes(self) -> int:
        """Bytes as these ranks gather them, if they shard weights or updates."""
        return self.bytes - self.rounded * (NUMBER_BYTES - self.rounded_to_bytes)

    @property
    def own(self) -> int:
        """Number that a rank updates if these ranks shard them."""
        return share(self.count, self.ranks)

    @property
    def own_rounded(self) -> int:
        """Number of these that are rounded."""
        return share(self.rounded, self.ranks)


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
    by_hand: bool = False  # whether the script runs the passes and sends the messages of stages, these in float32

    @classmethod
    def in_bytes(cls, settings: Any, axes: Layout, split: Split, device: Device = "cpu") -> "Costs":
        """Return the costs of a run with these settings on one host whose speed is unknown: only its bytes count."""
        ranks, link = layout_size(axes), Link(0.0, 1.0)
        machine = Machine("", device, 1, ranks, ranks, 1.0, link, link, 1.0)
        layout = RunLayout.of(settings, axes, split)
        return cls(machine, Model.of(settings), layout, optimizer=settings.optimizer)

    @functools.cached_property
    def on_hosts(self) -> RanksOnHosts:
        return RanksOnHosts(self.machine, self.layout)

    @functools.cached_property
    def activations(self) -> Activations:
        return Activations(self.model.sizes, self.layout, counts_outputs=not self.by_hand)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.activations.tokens

    def weights(self, *stages: int) -> int:
        """Return the number of weights of stages, on one rank."""
        return sum(one.count for one in self.weights_by_holders(*stages))

    def updated(self, *stages: int) -> int:
        """Return the number of these that a rank updates."""
        return sum(one.count if self.layout.shard == "none" else one.own for one in self.weights_by_holders(*stages))

    def weights_by_holders(self, *stages: int) -> tuple[Weights, Weights]:
        """Return the weights of stages, without experts and of experts."""
        sizes, layout, parts = self.model.sizes, self.layout, Counter[ModelPart]()
        for stage in stages:
            parts.update(layout.parts(stage))
        numbers, rounded = Counter[bool](), Counter[bool]()  # by whether they are of experts
        for part, count in parts.items():
            for one in sizes.parameters(part, layout.size("tp"), layout.size("ep")) if count else ():
                numbers[one.of_expert] += count * one.numbers
                rounded[one.of_expert] += count * one.numbers * one.is_rounded
        own, of_experts = (
            Weights(numbers[of_expert], rounded[of_expert], axes, layout.size(*axes), sizes.inner_bytes)
            for of_expert, axes in ((False, SAME_WEIGHTS), (True, SAME_EXPERTS))
        )
        return own, of_experts

    @property
    def stage_message_bytes(self) -> int:
        """Bytes of a micro-batch's activations on the way to the next stage."""
        return self.activations.end_bytes if self.by_hand else self.activations.message_bytes

    def seconds(self, action: Action, threads: int = 1) -> float:
        """Return the seconds of an action that no other rank slows down, including the collectives inside it."""
        if action.letter not in KIND_OF:
            return action.seconds(self._action_costs(threads))
        return self.pass_seconds(action.letter, action.stage, threads)

    @functools.cached_property
    def _action_costs(self) -> Callable[[int], ActionCosts]:
        """A function from threads to the costs from which other kinds of actions compute their times."""
        stages = range(len(self.layout.split))

        def of_threads(threads: int) -> ActionCosts:
            forward, whole, inputs, weights = (
                [self.pass_seconds(kind, stage, threads) for stage in stages] for kind in "FBIW"
            )
            kept = [self.activations.of_stage(stage) for stage in stages]
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
    def pass_seconds(self) -> Callable[[str, int, int], float]:
        """A function (letter of an action, stage, threads) -> seconds."""
        return functools.cache(self._pass_seconds)

    def _pass_seconds(self, letter: str, stage: int, threads: int) -> float:
        seconds = self._pass(KIND_OF[letter], stage, threads) + self.exchanged(letter, stage)
        if self.layout.computes_blocks_again(letter):
            seconds += self.layout.parts(stage)["block"] * self._block_again(threads)
        return seconds

    def _pass(self, kind: PassKind, stage: int, threads: int) -> float:
        own = sum(
            count * self._of_part(part, kind, threads) for part, count in self.layout.parts(stage).items() if count
        )
        return own if self._measured else own + self.machine.pass_seconds

    def _of_part(self, part: ModelPart, kind: PassKind, threads: int) -> float:
        sizes, tp = self.model.sizes, self.layout.size("tp")
        if self._measured:
            own, products = self._with_threads(threads, lambda entry: entry.seconds(part, kind, self._rows)), 0.0
        else:
            own, products = 0.0, sizes.multiply_adds(part, tp)
        if part == "block":
            products += (self.activations.attention.work - 1) * sizes.attention_multiply_adds(tp)
        speed = self.machine.speed(sizes.dtype, sizes.compiled)
        return own + self.tokens * products * SHARE_OF[kind] / speed / threads

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
        if self.layout.keeps_attention:
            sizes, tp = self.model.sizes, self.layout.size("tp")
            seconds *= 1 - sizes.attention_multiply_adds(tp) / sizes.multiply_adds("block", tp)
        return seconds

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

    def exchanged(self, letter: str, stage: int) -> float:
        """Return an action's seconds in collectives, if no other rank computes; unknown for new kinds of actions."""
        if letter not in KIND_OF:
            return 0.0
        exchanges = in_pass(self.activations, letter, stage)
        within = sum(self._seconds_of(one) for one in exchanges if one.count and one.axis != "cp")
        return within + self._gathered(KIND_OF[letter], stage) + self.sequence_seconds(letter, stage)

    def sequence_seconds(self, letter: str, stage: int) -> float:
        """Return the part of these in which ranks that share sequences send messages, one after another."""
        if self.layout.size("cp") == 1:
            return 0.0
        exchanges = (one for one in in_pass(self.activations, letter, stage) if one.axis == "cp")
        return self._beside_pass(sum(map(self._seconds_of, exchanges)), letter, stage)

    def _beside_pass(self, seconds: float, letter: str, stage: int) -> float:
        """Return what messages add to a pass. Only GPUs hide them behind it: on CPUs, sending needs the cores."""
        if not seconds or self.machine.device != "cuda":
            return seconds
        return max(0.0, seconds - self._pass(KIND_OF[letter], stage, 1))

    def _seconds_of(self, exchange: Exchange) -> float:
        hosts, axes, size_bytes = self.on_hosts, (exchange.axis,), exchange.size.bytes
        if exchange.axis == "tp":
            collective = hosts.all_reduce if exchange.rounds == 2 else hosts.half
            return exchange.count * collective(axes, size_bytes, "shared").alone
        if exchange.axis == "ep":
            return exchange.count * hosts.all_to_all(axes, size_bytes).alone
        if self.layout.cp_kind == "heads":
            ranks = self.layout.size("cp")
            return exchange.count * 4 * (ranks - 1) * hosts.message_in_ring(axes, size_bytes / (4 * ranks))
        return exchange.count * hosts.message_in_ring(axes, size_bytes)

    def _gathered(self, kind: PassKind, stage: int) -> float:
        """Return the seconds that sharded weights and gradients add to a pass."""
        shard = self.layout.shard
        if shard not in ("gradients", "weights") or kind == "W":
            return 0.0
        seconds, parts_with = 0.0, (sum(self.layout.parts(stage).values()), self.layout.parts(stage)["block"])
        for weights, in_model in zip(self.weights_by_holders(stage), parts_with, strict=True):
            # With sharded weights, each part of the model has its own collectives.
            parts = in_model if shard == "weights" else max(1, weights.bytes // SHARDED_BUCKET_BYTES)
            for sent_bytes in [weights.gathered_bytes] * (shard == "weights") + [weights.bytes] * (kind != "F"):
                if sent_bytes:
                    seconds += parts * self.on_hosts.half(weights.axes, sent_bytes / parts, "shared").alone
        return self._beside_pass(seconds, kind, stage)

    def kept_bytes(self, action: Action) -> int:
        """Return the bytes of activations that an action adds to those kept on its worker; negative if it frees them.

        They do not include the ids of the batch and the tables that all blocks of a process share.
        """
        if action.letter not in KIND_OF:
            return round(self._action_costs(1).kept_bytes(action))
        return self.activations.change(action)

    def balanced_split(self) -> Split:
        """Return the layers of each stage, such that the slowest stage is as fast as possible on this machine."""
        seconds = {part: sum(self._of_part(part, kind, 1) for kind in ("F", "B")) for part in self.layout.parts(0)}
        parts = PartCosts(seconds["block"], seconds["embedding"], seconds["head"])
        return _balance(self.model.n_layers, len(self.layout.split), parts)

    @functools.cached_property
    def estimated(self) -> ActionCosts:
        """The estimates from which a run derives the threads of its actions."""
        parts, again = self.model.sizes.parts, self.layout.recomputes_blocks
        return estimated_costs(self.layout.split, parts, again, self.tokens, self.layout.size("tp"))


_balance = functools.lru_cache(maxsize=4096)(balance)
