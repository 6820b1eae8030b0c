"""The bytes that a rank of a layout sends in a step, by kind, each with its formula in words."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from distlab.axes.layout import coordinate
from distlab_planner.costs import Costs
from distlab_planner.exchanges import TIMES, Exchange, Size, in_pass
from distlab_planner.graph import graph_of
from distlab_planner.layouts import SAME_WEIGHTS
from distlab_planner.model import ID_BYTES, NUMBER_BYTES

LOSS_BYTES = 8  # and of the gradients' norm
# Small, or only with flags that are not part of a layout.
NOT_COUNTED = "loss", "loads", "gradient norm", "other routes", "choices of experts"


@dataclass(frozen=True)
class Formula:
    """The bytes of a kind that a rank sends in a step."""

    bytes: int
    words: str  # how they are computed


class Formulas(dict[tuple[str, int | None], Formula]):
    """Formulas by kind, and the receiver of a message in the pipeline; None for collectives."""

    def add(self, kind: str, to: int | None, count: int | Fraction, times: str, size: Size) -> None:
        """Add `count` messages of a size; `times` is the count in words."""
        if count and size.numbers:
            words = f"{times} {TIMES} {size.words} {TIMES} {size.number_bytes}\N{NO-BREAK SPACE}B"
            total = int(count * size.numbers * size.number_bytes)
            if before := self.get((kind, to)):
                total, words = before.bytes + total, f"{before.words} + {words}"
            self[kind, to] = Formula(total, words)

    def add_ring(self, kind: str, ranks: int, count: int, rounds: int, size: Size) -> None:
        """Add collectives: an all-reduce is two rounds around a ring, an all-gather or a reduce-scatter is one."""
        times = f"{count} {TIMES} " * (count > 1) + f"{rounds} " * (rounds > 1) + f"({ranks} - 1) / {ranks}"
        self.add(kind, None, Fraction(count * rounds * (ranks - 1), ranks), times, size)

    def scale(self, kind: str, share: int | Fraction, words: str) -> None:
        """Multiply the formula of a kind of collectives, if there is one."""
        if formula := self.get((kind, None)):
            self[kind, None] = Formula(int(formula.bytes * share), f"{words} {TIMES} {formula.words}")


def sent_bytes(costs: Costs) -> list[int]:
    """Return, by worker, the bytes that a rank sends in a step, without small messages."""
    layout = costs.layout
    ranks = (layout.first_rank(worker) for worker in range(layout.size("pp")))
    formulas = (sent_in_step(costs, rank) for rank in ranks)
    return [sum(one.bytes for (kind, _), one in of.items() if kind not in NOT_COUNTED) for of in formulas]


def sent_in_step(costs: Costs, rank: int) -> Formulas:
    """Return the formulas of a rank; the numbers of rows for experts assume equal loads.

    Some kinds are sent only with flags that are not part of a layout, such as the norm of the gradients.
    """
    layout, formulas = costs.layout, Formulas()
    worker = coordinate(layout.axes, rank, "pp")
    stages = layout.stages_of(worker)
    _add_messages_of_stages(formulas, costs, worker)
    _add_averages(formulas, costs, stages)
    for kind in ("loss", "gradient norm", "other routes"):
        formulas.add_ring(kind, layout.ranks, 1, 2, Size(LOSS_BYTES // NUMBER_BYTES, "2 numbers"))
    _add_exchanges_in_passes(formulas, costs, worker)
    layers = sum(layout.parts(stage)["block"] for stage in stages)
    if costs.model.sizes.experts and layers:
        _add_choices_of_experts(formulas, costs, layers)
    return formulas


def _add_messages_of_stages(formulas: Formulas, costs: Costs, worker: int) -> None:
    layout, sizes = costs.layout, costs.model.sizes
    words = f"{costs.tokens:,} tokens {TIMES} {sizes.dmodel} wide"
    size = Size(costs.tokens * sizes.dmodel, words, NUMBER_BYTES if costs.by_hand else sizes.inner_bytes)
    for (sender, receiver, kind), count in graph_of(layout).messages_by_link.items():
        if sender == worker:
            formulas.add(kind, receiver, count, f"{count} messages", size)


def _add_averages(formulas: Formulas, costs: Costs, stages: Sequence[int]) -> None:
    """Add how replicas average gradients, and gather weights that they shard or update in shards."""
    shard, parts = costs.layout.shard, costs.layout.micro_batches
    counts = {"none": (1, 0), "optimizer": (1, 1), "gradients": (parts, 1), "weights": (parts, 2 * parts)}
    reduced, gathered = counts[shard]
    for own in costs.weights_by_holders(*stages):
        weights, ranks = Size(own.count, f"{own.count:,} weights"), own.ranks
        formulas.add_ring("gradients", ranks, reduced, 2 if shard == "none" else 1, weights)
        for count, number_bytes in (
            (own.count - own.rounded, NUMBER_BYTES),
            (own.rounded, own.rounded_to_bytes),
        ):
            size = Size(count, f"{count:,} weights", number_bytes)
            formulas.add_ring("weights", ranks, gathered, 1, size)


def _add_exchanges_in_passes(formulas: Formulas, costs: Costs, worker: int) -> None:
    in_step: Counter[Exchange] = Counter()
    for (letter, stage), count in graph_of(costs.layout).counts[worker].items():
        for one in in_pass(costs.activations, letter, stage):
            in_step[replace(one, count=1)] += count * one.count
    for one, count in in_step.items():
        if one.axis != "cp" or one.kind == "heads":
            formulas.add_ring(one.kind, costs.layout.size(one.axis), count, one.rounds, one.size)
        else:
            formulas.add(one.kind, None, count, f"{count} messages", one.size)


def _add_choices_of_experts(formulas: Formulas, costs: Costs, layers: int) -> None:
    """Add what ranks tell each other about the rows of the experts in some layers."""
    layout, sizes, tokens = costs.layout, costs.model.sizes, costs.tokens
    k, forward, others = sizes.experts_per_token, layers * layout.micro_batches, layout.size("cp") - 1
    counts = Size(sizes.experts, f"{sizes.experts} experts", ID_BYTES)
    formulas.add_ring("counts of rows", layout.size("ep"), forward, 1, counts)
    choices = Size(k * tokens, f"{k} {TIMES} {tokens:,} tokens", ID_BYTES)  # with a capacity
    formulas.add("choices of experts", None, forward * others, f"{forward} {TIMES} {others}", choices)
    loads = Size(layers * (sizes.experts + 1), f"{layers} layers {TIMES} ({sizes.experts} + 1) numbers", ID_BYTES)
    formulas.add_ring("loads", layout.size(*SAME_WEIGHTS), 1, 2, loads)
