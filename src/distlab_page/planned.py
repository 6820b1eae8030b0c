"""The messages and the memory that a run should have, by the planner's formulas; nothing is measured here."""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

from distlab.axes.layout import coordinate
from distlab.comm.link import Link
from distlab.pipeline.actions import stages_of
from distlab.pipeline.plan import simulate
from distlab_page.records import Records
from distlab_planner.costs import Costs
from distlab_planner.layouts import RunLayout
from distlab_planner.machine import Machine
from distlab_planner.memory import held
from distlab_planner.model import ID_BYTES, NUMBER_BYTES, Model, ModelSettings, Sizes
from distlab_planner.step import LOSS_BYTES
from simplellm.errors import InputError

TIMES = "\N{MULTIPLICATION SIGN}"
# Settings that the planner's formulas do not count, with the values for which they hold.
WITHOUT: dict[str, tuple[Any, ...]] = {
    "residual": ("float32",),
    "document_mask": (False,),
    "outer": ("none",),
    "compress": ("none",),
    "sequence_parallel": (False,),
    "run_on": (False,),
    "repair": ("off",),
    "resume": (None,),
    "compile": (False, None, "none"),
}
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


Formulas = dict[tuple[str, int | None], Formula]  # by kind, and a message's receiver in the pipeline; None: collectives


def costs_of(run: Records) -> Costs | None:
    """Return a run in the planner's terms; None if the planner does not know such runs."""
    settings, layout = run.settings, run.layout
    is_known = all(name in settings for name in NEEDED) and all(
        name not in settings or settings[name] in values for name, values in WITHOUT.items()
    )
    shares_vocabulary = layout.get("tp", 1) == 1 or "tp" in settings  # the scripts of the chapter on slices do not
    if not (is_known and shares_vocabulary) or run.sync_every is not None or settings.get("schedule") == "auto":
        return None
    tokenizer = settings["tokenizer"] and Path(settings["tokenizer"])
    sizes = Sizes.of(cast(ModelSettings, SimpleNamespace(**{**settings, "tokenizer": tokenizer})))
    own = RunLayout(
        layout,
        batch_size=settings["batch_size"],
        micro_batches=settings["micro_batches"],
        schedule=settings.get("schedule", "naive"),
        recompute=settings["recompute"],
        shard=settings.get("shard", "none"),
        split=tuple(run.config.get("layers_per_stage", [settings["n_layers"]])),
        cp_kind=settings.get("cp_kind", "gather"),
        cp_order=settings.get("cp_order", "contiguous"),
    )
    try:
        own.programs()
    except InputError:  # a schedule of the user's own, or with other chunks
        return None
    link = Link(0.0, 1.0)
    device: Literal["cpu", "cuda"] = "cuda" if "gpu" in run.config.get("machine", {}) else "cpu"
    machine = Machine("", device, 1, run.ranks, run.ranks, 1.0, link, link, 1.0)
    # Scripts with whole passes only send activations in float32 (`StageSettings.casts_messages`).
    casts = "tp" in settings or "chunks_per_stage" in settings
    model = Model(sizes, settings["n_layers"])
    return Costs(machine, model, own, optimizer=settings["optimizer"], casts_messages=casts)


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


def sent_by(costs: Costs, rank: int) -> Formulas:
    """Return what a rank should send in a step; kinds that are not part of every step have no formula."""
    layout, sizes, tokens, attention = costs.layout, costs.model.sizes, costs.tokens, costs.attention
    worker, programs, formulas = coordinate(layout.axes, rank, "pp"), layout.programs(), Formulas()

    def add(kind: str, to: int | None, count: int | Fraction, times: str, size: Size) -> None:
        if count:
            before, words = formulas.get((kind, to)), f"{times} {TIMES} {size.words} {TIMES} {size.number_bytes} B"
            total = int(count * size.numbers * size.number_bytes)
            formulas[kind, to] = (
                Formula(before.bytes + total, f"{before.words} + {words}") if before else Formula(total, words)
            )

    def add_ring(kind: str, ranks: int, count: int, rounds: int, size: Size) -> None:
        """Add collectives: an all-reduce is two rounds around a ring, an all-gather or a reduce-scatter is one."""
        times = f"{count} {TIMES} " * (count > 1) + f"{rounds} " * (rounds > 1) + f"({ranks} - 1) / {ranks}"
        add(kind, None, Fraction(count * rounds * (ranks - 1), ranks), times, size)

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
    for kind in ("loss", "gradient norm"):
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
        numbers = round(4 * ranks * attention.message_bytes / sizes.inner_bytes)  # of queries, keys, values, results
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
