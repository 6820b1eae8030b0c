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
from distlab_planner.model import NUMBER_BYTES, Model, ModelSettings, Sizes
from distlab_planner.step import LOSS_BYTES
from simplellm.errors import InputError

TIMES = "\N{MULTIPLICATION SIGN}"
# Settings that the planner's formulas do not count, with the values for which they hold.
WITHOUT: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32",),
    "document_mask": (False,),
    "experts": (0,),
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
    return Costs(machine, Model(sizes, settings["n_layers"]), own, optimizer=settings["optimizer"])


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

    def add(kind: str, to: int | None, count: int | Fraction, times: str, numbers: int, words: str) -> None:
        if count:
            before, words = formulas.get((kind, to)), f"{times} {TIMES} {words} {TIMES} {NUMBER_BYTES} B"
            size = int(count * numbers * NUMBER_BYTES)
            formulas[kind, to] = (
                Formula(before.bytes + size, f"{before.words} + {words}") if before else Formula(size, words)
            )

    def add_ring(kind: str, ranks: int, count: int, rounds: int, numbers: int, words: str) -> None:
        """Add collectives: an all-reduce is two rounds around a ring, an all-gather or a reduce-scatter is one."""
        times = f"{count} {TIMES} " * (count > 1) + f"{rounds} " * (rounds > 1) + f"({ranks} - 1) / {ranks}"
        add(kind, None, Fraction(count * rounds * (ranks - 1), ranks), times, numbers, words)

    activations = tokens * sizes.dmodel, f"{tokens:,} tokens {TIMES} {sizes.dmodel} wide"
    for (sender, receiver, kind), sent in simulate(programs).messages.items():
        if sender == worker:
            add(kind, receiver, len(sent), f"{len(sent)} messages", *activations)

    weights, parts = sum(map(costs.weights, stages_of(programs[worker]))), layout.micro_batches
    counts = {"none": (1, 0), "optimizer": (1, 1), "gradients": (parts, 1), "weights": (parts, 2 * parts)}
    for kind, count in zip(("gradients", "weights"), counts[layout.shard], strict=True):
        add_ring(kind, layout.copies, count, 2 if layout.shard == "none" else 1, weights, f"{weights:,} weights")
    for kind in ("loss", "gradient norm"):
        add_ring(kind, layout.ranks, 1, 2, LOSS_BYTES // NUMBER_BYTES, "2 numbers")

    if layout.recompute != "none":  # then collectives of forward passes run again, if the output needs them
        return formulas
    passes: Counter[tuple[str, str]] = Counter()  # through parts of the model, forward and backward
    for action in programs[worker]:
        for part, count in costs.parts(action.stage).items():
            passes[action.letter.replace("I", "B"), part] += count
    forward, backward = passes["F", "block"], passes["B", "block"]
    slices, others, keys = layout.size("tp"), layout.size("cp") - 1, attention.keys_bytes // NUMBER_BYTES
    for kind, count, size in (
        ("layer activations", 2 * forward, activations),
        ("layer gradients", 2 * backward, activations),
        ("vocabulary activations", passes["F", "embedding"], activations),
        ("vocabulary activations", passes["F", "head"], (3 * tokens, f"3 {TIMES} {tokens:,} tokens")),
        ("vocabulary gradients", passes["B", "head"], activations),
    ):
        add_ring(kind, slices, count, 2, *size)
    if layout.cp_kind != "heads":
        is_ring = layout.cp_kind == "ring"
        to, visits = (worker, forward + backward) if is_ring else (None, forward)  # they travel again for gradients
        for kind, count in (("keys and values", visits), ("gradients of keys and values", backward)):
            add(kind, to, others * count, f"{others * count} messages", keys, f"{keys:,} numbers")
    return formulas
