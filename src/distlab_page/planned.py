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
    "sync_every": (),
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


def costs_of(run: Records) -> Costs | None:
    """Return a run in the planner's terms; None if the planner does not know such runs."""
    settings, layout = run.settings, run.layout
    is_known = all(name in settings for name in NEEDED) and all(
        name not in settings or settings[name] in values for name, values in WITHOUT.items()
    )
    shares_vocabulary = layout.get("tp", 1) == 1 or "tp" in settings  # the scripts of the chapter on slices do not
    if not (is_known and shares_vocabulary) or settings.get("schedule") == "auto":
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


def sent_by(costs: Costs, rank: int) -> dict[str, Formula]:
    """Return what a rank should send in a step, by kind; only kinds with a formula."""
    layout, sizes = costs.layout, costs.model.sizes
    worker, programs, formulas = coordinate(layout.axes, rank, "pp"), layout.programs(), dict[str, Formula]()
    counts: Counter[str] = Counter()
    for (sender, _, kind), messages in simulate(programs).messages.items():
        counts[kind] += len(messages) * (sender == worker)
    for kind, count in counts.items():
        words = f"{count} messages {TIMES} {costs.tokens:,} tokens {TIMES} {sizes.dmodel} wide {TIMES} {NUMBER_BYTES} B"
        if count:
            formulas[kind] = Formula(count * costs.message_bytes, words)
    weights, copies = sum(map(costs.weights, stages_of(programs[worker]))), layout.copies
    if layout.shard == "none" and copies > 1:
        words = f"2 ({copies} - 1) / {copies} {TIMES} {weights:,} weights {TIMES} {NUMBER_BYTES} B"
        formulas["gradients"] = Formula(_ring(weights * NUMBER_BYTES, copies), words)
    if layout.ranks > 1:
        words = f"2 ({layout.ranks} - 1) / {layout.ranks} {TIMES} {LOSS_BYTES} B"
        formulas["loss"] = Formula(_ring(LOSS_BYTES, layout.ranks), words)
    return formulas


def _ring(size_bytes: int, ranks: int) -> int:
    """Return the bytes that each rank sends in an all-reduce around a ring, as the ledger counts them."""
    return int(Fraction(2 * (ranks - 1) * size_bytes, ranks))
