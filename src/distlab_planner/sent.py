"""The bytes that a rank of a layout sends in a step, by kind, each with its formula in words."""

import functools
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from distlab.axes.layout import coordinate
from distlab.pipeline.actions import Result, stages_of
from distlab.pipeline.plan import Link, simulate
from distlab_planner.costs import Costs
from distlab_planner.layouts import programs_of
from distlab_planner.model import ID_BYTES, NUMBER_BYTES

TIMES = "\N{MULTIPLICATION SIGN}"
LOSS_BYTES = 8  # and of the gradients' norm
NOT_ALWAYS = "gradient norm", "other routes", "choices of experts"  # only with flags that are not part of a layout
SMALL = "loss", "loads"
WAYS = {"R": "again", **dict.fromkeys("Ff", "forward"), **dict.fromkeys("BbIi", "backward")}  # actions by letter


@dataclass(frozen=True)
class Size:
    """The size of a message or of a collective's tensor."""

    numbers: int
    words: str
    number_bytes: int = NUMBER_BYTES


@dataclass(frozen=True)
class Formula:
    """The bytes of a kind that a rank sends in a step."""

    bytes: int
    words: str  # how they are computed


class Formulas(dict[tuple[str, int | None], Formula]):
    """Formulas by kind, and the receiver of a message in the pipeline; None for collectives."""

    def add(self, kind: str, to: int | None, count: int | Fraction, times: str, size: Size) -> None:
        """Add `count` messages of a size; `times` is the count in words."""
        if count:
            before, words = (
                self.get((kind, to)),
                f"{times} {TIMES} {size.words} {TIMES} {size.number_bytes}\N{NO-BREAK SPACE}B",
            )
            total = int(count * size.numbers * size.number_bytes)
            self[kind, to] = (
                Formula(before.bytes + total, f"{before.words} + {words}") if before else Formula(total, words)
            )

    def add_ring(self, kind: str, ranks: int, count: int, rounds: int, size: Size) -> None:
        """Add collectives: an all-reduce is two rounds around a ring, an all-gather or a reduce-scatter is one."""
        times = f"{count} {TIMES} " * (count > 1) + f"{rounds} " * (rounds > 1) + f"({ranks} - 1) / {ranks}"
        self.add(kind, None, Fraction(count * rounds * (ranks - 1), ranks), times, size)

    def scale(self, kind: str, share: int | Fraction, words: str) -> None:
        """Multiply the formula of a kind of collectives, if there is one."""
        if formula := self.get((kind, None)):
            self[kind, None] = Formula(int(formula.bytes * share), f"{words} {TIMES} {formula.words}")


@functools.lru_cache(maxsize=64)
def _messages(schedule: str, workers: int, micro_batches: int, recompute: bool) -> dict[Link, list[Result]]:
    return simulate(programs_of(schedule, workers, micro_batches, recompute)).messages


def sent_bytes(costs: Costs) -> list[int]:
    """Return, by worker, the bytes that a rank sends in a step, without small messages."""
    layout, left_out = costs.layout, {*NOT_ALWAYS, *SMALL}
    ranks = (layout.first_rank(worker) for worker in range(layout.size("pp")))
    formulas = (sent_in_step(costs, rank) for rank in ranks)
    return [sum(one.bytes for (kind, _), one in of.items() if kind not in left_out) for of in formulas]


def sent_in_step(costs: Costs, rank: int) -> Formulas:
    """Return the formulas of a rank; the numbers of rows for experts assume equal loads.

    Some kinds are sent only with flags that are not part of a layout, such as the norm of the gradients.
    """
    layout, sizes, tokens, attention = costs.layout, costs.model.sizes, costs.tokens, costs.attention
    worker, programs, formulas = coordinate(layout.axes, rank, "pp"), layout.programs(), Formulas()
    add, add_ring = formulas.add, formulas.add_ring

    def activations(number_bytes: int) -> Size:
        return Size(tokens * sizes.dmodel, f"{tokens:,} tokens {TIMES} {sizes.dmodel} wide", number_bytes)

    messages = activations(sizes.inner_bytes if costs.casts_messages else NUMBER_BYTES)
    sent_by_link = _messages(layout.schedule, layout.size("pp"), layout.micro_batches, layout.recompute == "all")
    for (sender, receiver, kind), sent in sent_by_link.items():
        if sender == worker:
            add(kind, receiver, len(sent), f"{len(sent)} messages", messages)

    stages, parts = stages_of(programs[worker]), layout.micro_batches
    counts = {"none": (1, 0), "optimizer": (1, 1), "gradients": (parts, 1), "weights": (parts, 2 * parts)}
    reduced, gathered = counts[layout.shard]
    by_holders = zip(costs.weights_by_holders(*stages), costs.rounded_by_holders(*stages), strict=True)
    for (count, holders), (rounded, _) in by_holders:  # all weights but experts', and experts'
        weights = Size(count, f"{count:,} weights")
        add_ring("gradients", holders.size, reduced * bool(count), 2 if layout.shard == "none" else 1, weights)
        for numbers, number_bytes in ((count - rounded, NUMBER_BYTES), (rounded, sizes.inner_bytes)):
            if numbers:
                add_ring("weights", holders.size, gathered, 1, Size(numbers, f"{numbers:,} weights", number_bytes))
    for kind in ("loss", "gradient norm", "other routes"):
        add_ring(kind, layout.ranks, 1, 2, Size(LOSS_BYTES // NUMBER_BYTES, "2 numbers"))

    passes: Counter[tuple[str, str]] = Counter()  # through parts of the model: forward, forward again, backward
    unneeded = 0  # products of blocks that run again, which only the output needs
    for action in programs[worker]:
        held = costs.parts(action.stage)
        for part, number in held.items():
            passes[WAYS.get(action.letter, ""), part] += number
        if action.letter in "bi" or (action.letter in "BI" and layout.recomputes_blocks):
            passes["again", "block"] += held["block"]
            unneeded += held["block"]
        unneeded += action.letter == "R" and not held["head"]
    forward, backward, again = (passes[way, "block"] for way in ("forward", "backward", "again"))
    embeddings, logits = (passes["forward", part] + passes["again", part] for part in ("embedding", "head"))
    inner, whole = activations(sizes.inner_bytes), activations(NUMBER_BYTES)
    k, ep = sizes.experts_per_token, layout.size("ep")
    rows = Size(k * inner.numbers, f"{k} {TIMES} {inner.words} at equal loads", inner.number_bytes)
    add_ring("rows of experts", ep, 2 * (forward + again + backward), 1, rows)
    add_ring("counts of rows", ep, forward, 1, Size(sizes.experts, f"{sizes.experts} experts", ID_BYTES))
    choices = Size(k * tokens, f"{k} {TIMES} {tokens:,} tokens", ID_BYTES)  # with a capacity
    others = layout.size("cp") - 1
    add("choices of experts", None, forward * others, f"{forward} {TIMES} {others}", choices)
    if sizes.experts and (layers := forward // parts):
        loads = Size(layers * (sizes.experts + 1), f"{layers} layers {TIMES} ({sizes.experts} + 1) numbers", ID_BYTES)
        add_ring("loads", layout.copies, 1, 2, loads)
    products = (1, 0) if sizes.experts else (2, unneeded)  # each slice computes all experts
    for kind, times, size in (
        ("layer activations", products[0] * (forward + again) - products[1], inner),
        ("layer gradients", products[0] * backward, inner),
        ("vocabulary activations", embeddings, whole),
        ("vocabulary activations", logits, Size(3 * tokens, f"3 {TIMES} {tokens:,} tokens")),
        ("vocabulary gradients", passes["backward", "head"], inner),
    ):
        add_ring(kind, layout.size("tp"), times, 2, size)

    ranks, forward = layout.size("cp"), forward + again * (layout.recompute != "except-attention")
    if layout.cp_kind == "heads":
        numbers = round(4 * ranks * attention.forward[1] / sizes.inner_bytes)  # of queries, keys, values, results
        exchanged = Size(numbers, f"{numbers:,} numbers", sizes.inner_bytes)
        add_ring("heads", ranks, forward + backward, 1, exchanged)
        return formulas
    is_ring = layout.cp_kind == "ring"
    to, visits = (worker, forward + backward) if is_ring else (None, forward)  # they travel again for gradients
    numbers = 2 * layout.rows * attention.positions * sizes.kv_width // layout.size("tp")
    of_gradients = NUMBER_BYTES if is_ring else sizes.inner_bytes  # a ring adds them up on the way
    for kind, times, number_bytes in (
        ("keys and values", visits, sizes.inner_bytes),
        ("gradients of keys and values", backward, of_gradients),
    ):
        count = (ranks - 1) * times
        add(kind, to, count, f"{count} messages", Size(numbers, f"{numbers:,} numbers", number_bytes))
    return formulas
