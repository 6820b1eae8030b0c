"""The messages and the memory that a run should have, by the planner's formulas; nothing is measured here."""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

from distlab.axes.layout import coordinate
from distlab.comm.link import Link
from distlab.parallel.division import encoded_bytes
from distlab.pipeline.actions import stages_of
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import AUTO
from distlab_page.records import Records
from distlab_planner.costs import Costs
from distlab_planner.layouts import RunLayout
from distlab_planner.machine import Machine
from distlab_planner.memory import held
from distlab_planner.model import ID_BYTES, NUMBER_BYTES, Model, ModelSettings, Sizes
from distlab_planner.step import LOSS_BYTES
from simplellm.errors import InputError

TIMES = "\N{MULTIPLICATION SIGN}"
# Settings with which ranks hold other memory than the planner counts, with the values for which it counts it.
IN_MEMORY = {"residual": "float32", "sequence_parallel": False, "capacity": 0}
NEEDED = (
    "dmodel num_heads num_kv_heads hidden_dim seq_len n_layers batch_size micro_batches recompute optimizer".split()
)
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


def costs_of(run: Records) -> Costs | None:
    """Return a run in the planner's terms; None if the planner does not know such runs."""
    settings, layout = run.settings, run.layout
    is_known = all(name in settings for name in NEEDED) and settings.get("tp_style") != "naive"
    if settings.get("sequence_parallel"):  # in equal parts, none of which is computed again
        is_known &= settings["seq_len"] % layout["tp"] == 0
        is_known &= (settings["recompute"], settings["dtype"]) == ("none", "float32")
    if not is_known or settings.get("all_reduce", "library") != "library":
        return None
    schedule = settings.get("schedule", "naive")
    if schedule == AUTO and settings["chunks_per_stage"] == 1:  # its messages are those of any with the same stages
        schedule = "dapple"
    tokenizer = settings["tokenizer"] and Path(settings["tokenizer"])
    sizes = Sizes.of(cast(ModelSettings, SimpleNamespace(**{**settings, "tokenizer": tokenizer})))
    own = RunLayout(
        layout,
        batch_size=settings["batch_size"],
        micro_batches=settings["micro_batches"],
        schedule=schedule,
        recompute=settings["recompute"],
        shard=settings.get("shard", "none"),
        split=tuple(run.config.get("layers_per_stage", [settings["n_layers"]])),
        cp_kind=settings.get("cp_kind", "gather"),
        cp_order=settings.get("cp_order", "contiguous"),
    )
    try:
        if sum(len(stages_of(program)) for program in own.programs()) != len(own.split):  # other chunks
            return None
    except InputError:  # a schedule of the user's own
        return None
    link = Link(0.0, 1.0)
    device: Literal["cpu", "cuda"] = "cuda" if "gpu" in run.config.get("machine", {}) else "cpu"
    machine = Machine("", device, 1, run.ranks, run.ranks, 1.0, link, link, 1.0)
    # Scripts with whole passes only send activations in float32 (`StageSettings.casts_messages`).
    casts = "tp" in settings or "chunks_per_stage" in settings
    model = Model(sizes, settings["n_layers"])
    return Costs(machine, model, own, optimizer=settings["optimizer"], casts_messages=casts)


def counts_memory(run: Records) -> bool:
    """Return whether the planner counts the memory of such runs."""
    settings = run.settings
    shares_vocabulary = run.layout.get("tp", 1) == 1 or "tp" in settings or "tp_style" in settings
    is_usual = all(settings.get(name, usual) == usual for name, usual in IN_MEMORY.items())
    return shares_vocabulary and is_usual and settings.get("schedule") != AUTO and run.sync_every is None


def sent_by(run: Records, costs: Costs, rank: int, steps: int) -> Formulas:
    """Return what a rank should send in a step, as the mean of the last `steps`.

    Kinds that are not sent in each step, such as those of checkpoints, have no formula.
    """
    formulas, settings, layout, model = _of_layout(costs, rank), run.settings, costs.layout, costs.model
    replicas, parts, compress = layout.size("dp"), layout.micro_batches, settings.get("compress", "none")
    stages = stages_of(layout.programs()[coordinate(layout.axes, rank, "pp")])
    weights, holders = costs.weights_by_holders(*stages)[0]
    if (settings.get("report_every") or 1) > 1:
        reported = sum(record["loss"] is not None for record in run.metrics[-steps:])
        formulas.scale("loss", Fraction(reported, steps), f"{reported} of {steps} steps")
    if run.config.get("averages_in_each_pass"):
        formulas.scale("gradients", parts, f"{parts} passes")
    if settings.get("repair") == "exact":  # a sum for each replica, whoever computes it
        formulas.scale("gradients", replicas, f"{replicas} sums")
    if run.sync_every is not None:
        formulas.pop(("gradients", None), None)
        formulas.add_ring("gradients", layout.size("cp"), 1, 2, Size(weights, f"{weights:,} weights"))
        _add_exchanges(formulas, run, weights, replicas, steps)
    elif compress == "powersgd":
        del formulas["gradients", None]
        factors = _factors(model.sizes, model.n_layers, settings["powersgd_rank"])
        formulas.add_ring("gradients", holders.size, 1, 2, Size(factors, f"{factors:,} factors"))
    elif compress == "topk":
        del formulas["gradients", None]
        most = Size(int(settings["topk_share"] * weights), f"{settings['topk_share']:g} {TIMES} {weights:,} weights", 8)
        formulas.add("gradients", None, holders.size - 1, f"({holders.size} - 1)", most)
    if settings.get("sequence_parallel"):
        gains = Size(model.sizes.dmodel, f"{model.sizes.dmodel} gains")
        formulas.add_ring("norm gradients", layout.size("tp"), parts * (2 * model.n_layers + 1), 2, gains)
    return formulas


def _add_exchanges(formulas: Formulas, run: Records, weights: int, replicas: int, steps: int) -> None:
    """Add what replicas that train independently exchange: weights, or what changes them, in fragments."""
    settings, every = run.settings, run.sync_every or 1
    kind = "outer gradients" if "outer_lr" in settings else "weights"
    fragments, compress = settings.get("fragments", 1), settings.get("compress", "none")
    done = [record["step"] + 1 for record in run.metrics[-steps:]]
    due = [step // (every // fragments) for step in done if step % (every // fragments) == 0]
    if kind == "weights" and settings["steps"] in done and settings["steps"] % every:
        due.append(1)  # after the last step too
    for fragment in range(fragments):
        size = weights * (fragment + 1) // fragments - weights * fragment // fragments
        count = sum((number - 1) % fragments == fragment for number in due)
        times = f"{count} in {steps} steps {TIMES} "
        if compress == "none":
            share, words = Fraction(2 * count * (replicas - 1), replicas * steps), f"2 ({replicas} - 1) / {replicas}"
            formulas.add(kind, None, share, times + words, Size(size, f"{size:,} weights"))
        else:
            message_bytes = encoded_bytes(compress, size)
            message = Size(message_bytes, f"{message_bytes:,} ({size:,} weights as {compress})", 1)
            formulas.add(kind, None, Fraction(count * (replicas - 1), steps), times + f"({replicas} - 1)", message)


def _factors(sizes: Sizes, n_layers: int, width: int) -> int:
    """Return the numbers in PowerSGD's factors of all gradients, or in those gradients that are smaller."""
    d, kv, hidden = sizes.dmodel, sizes.kv_width, sizes.hidden_dim
    block = [(d, d), (d, d), (kv, d), (kv, d), *3 * [(hidden, d)]]
    matrices = [*2 * [(sizes.vocab_size, d)], *n_layers * block]
    return sum(min(width * (a + b), a * b) for a, b in matrices) + (2 * n_layers + 1) * d


def memory_of(costs: Costs, rank: int) -> dict[str, int]:
    """Return the bytes that a rank should hold, by the kinds of `memory.json`."""
    plan = held(costs, coordinate(costs.layout.axes, rank, "pp"))
    return {
        "parameters": plan.parameters,
        "gradients": plan.gradients,
        "optimizer state": plan.optimizer_state,
        "gathered": plan.gathered,
        "activations": plan.activations,
    }


def _of_layout(costs: Costs, rank: int) -> Formulas:
    """Return what a rank sends in a step of its layout, whatever the other settings."""
    layout, sizes, tokens, attention = costs.layout, costs.model.sizes, costs.tokens, costs.attention
    worker, programs, formulas = coordinate(layout.axes, rank, "pp"), layout.programs(), Formulas()
    add, add_ring = formulas.add, formulas.add_ring

    def activations(number_bytes: int) -> Size:
        return Size(tokens * sizes.dmodel, f"{tokens:,} tokens {TIMES} {sizes.dmodel} wide", number_bytes)

    messages = activations(sizes.inner_bytes if costs.casts_messages else NUMBER_BYTES)
    for (sender, receiver, kind), sent in simulate(programs).messages.items():
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
