"""The verdict on two runs: are they the same training run, and how far do their losses differ?"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from distlab.run.commands import launcher
from distlab.settings.experts import ExpertSettings
from distlab.settings.resume_policy import OF_TRAINING, marked
from distlab.settings.training import TrainSettings
from distlab_page.records import Records, in_words
from distlab_page.tables import MOST_ROWS, Json, evenly_spaced, shown_of, table

# Relative differences of losses: up to the first, the runs are the same but for the order in which they add; up to the
# second, rounding of many steps may have added up, but a small fault looks alike.
BOUNDS = {"float32": (1e-5, 1e-3), "bfloat16": (2e-3, 2e-2)}
# The settings that make a training run what it is, whatever the layout. One that a script lacks counts as None.
TRAINING = *marked(TrainSettings(), *OF_TRAINING), "tokenizer"
# Others that not every script and every older run has, with the value that those then have.
OTHERS: dict[str, Any] = {"compress": "none", "residual": "float32"} | vars(ExpertSettings())
Pair = tuple[int, float | None, float | None]  # a step, and the losses of both runs


def verdict(run: Records, other: Records) -> Json:
    """Return whether two runs are the same training run, by their settings, their batches and their losses."""
    who = "one process" if other.ranks == 1 else f"{other.name} ({in_words(other)})"
    runs = {"the run": run, "one process" if other.ranks == 1 else other.name: other}
    reasons = [f"{name} {ours} and {theirs}" for name, ours, theirs in _different_settings(run, other)]
    if reasons:
        return {"is_same": None, "text": f"Not the same training run as {who}: {'; '.join(reasons)}.", "table": None}
    ours, theirs = _losses(run), _losses(other)
    shared = [(step, loss, theirs[step]) for step, loss in ours.items() if step in theirs]
    if not shared:
        return {"is_same": None, "text": f"Nothing to compare with {who}: the runs share no step.", "table": None}
    dtype = run.settings.get("dtype", "float32")
    same, close = BOUNDS.get(dtype, BOUNDS["float32"])
    differences = {step: abs(a - b) for step, a, b in shared if a is not None and b is not None}
    worst, step = max((_relative(a, b), step) for step, a, b in shared)
    parts, most = [*_missing([*runs], shared)], max(differences.values(), default=0.0)
    if differences:
        differ = f"losses differ by at most {most:.2g}" if most else "equal losses"
        in_step = f", in step {step} by {worst:.2g} of the loss" * (same < worst < math.inf)
        parts.insert(0, f"{differ} over {_extent(runs, differences)}{in_step}")
    text = f"Not the same losses as {who}: {'; '.join(parts)}."
    if worst <= same:
        text = f"The same run as {who}: {'; '.join(parts)}."
    elif worst <= close:
        text = (
            f"Close to {who}, but not the same run: {'; '.join(parts)}, more than the {same:g} of rounding in {dtype}. "
            f"{launcher()} compare {run.folder} {other.folder} finds the first difference, in runs with "
            "--record-gradients."
        )
    rows = [(step, a, b, differences.get(step)) for step, a, b in evenly_spaced(shared, MOST_ROWS)]
    head = ("step", run.name, other.name, "difference")
    shown = table(f"Losses of both runs, {shown_of(rows, shared)}", head, rows)
    return {"is_same": worst <= same, "text": text, "table": shown}


def _losses(run: Records) -> dict[int, float | None]:
    """Return the loss of each step for which ranks exchange it; None for one that is not finite."""
    every, losses = run.settings.get("report_every") or 1, {r["step"]: r["loss"] for r in run.metrics}
    return {
        step: loss if loss is not None and math.isfinite(loss) else None
        for step, loss in losses.items()
        if loss is not None or (step + 1) % every == 0
    }


def _relative(ours: float | None, theirs: float | None) -> float:
    """Return the relative difference of two losses; infinite if only one of them is a number."""
    if ours == theirs:
        return 0.0
    return math.inf if ours is None or theirs is None else abs(ours - theirs) / max(abs(ours), abs(theirs))


def _missing(names: Sequence[str], shared: Sequence[Pair]) -> Iterator[str]:
    """Yield which of the two runs has no finite loss, and in which steps."""
    for who, lacking in ((names[0], (True, False)), (names[1], (False, True)), ("neither", (True, True))):
        steps = [step for step, a, b in shared if (a is None, b is None) == lacking]
        if steps:
            more = f" and {len(steps) - 1:,} more" * (len(steps) > 1)
            yield f"in step {steps[0]}{more}, {who} has {'a' if all(lacking) else 'no'} finite loss"


def _extent(runs: Mapping[str, Records], steps: Collection[int]) -> str:
    """Return in words how many of all steps are compared."""
    asked = max(run.settings.get("steps") or run.steps for run in runs.values())
    if len(steps) == asked:
        return f"{asked:,} steps"
    ends = {"running": "goes on", "ended early": "ended early"}
    why = ", ".join(f"{name} {ends[run.state]}" for name, run in runs.items() if run.state in ends)
    first = "the first " * ([*steps] == [*range(len(steps))])
    return f"{first}{len(steps):,} of {asked:,} steps" + f" ({why})" * bool(why)


def _different_settings(run: Records, other: Records) -> Iterator[tuple[str, Any, Any]]:
    ours, theirs = _in_effect(run), _in_effect(other)
    for name, value in ours.items():
        if name in theirs and value != theirs[name]:
            yield name, value, theirs[name]
    if run.config.get("data") != other.config.get("data"):
        yield "data", run.config.get("data"), other.config.get("data")
    batches = _per_step(run), _per_step(other)
    if None not in batches and batches[0] != batches[1]:
        yield f"{run.unit} in a step", *batches


def _in_effect(run: Records) -> dict[str, Any]:
    """Return the settings that make a training run what it is, without those that only matter if another is given."""
    settings = OTHERS | {"fragments": 1, "overlap_steps": 0} | run.settings | {"sync_every": run.sync_every}
    names = [*TRAINING, *OTHERS, "sync_every"]
    if run.sync_every is not None:
        names += ["outer_lr", "outer_momentum", "fragments", "overlap_steps"]
        names += ["merge_alpha"] * bool(settings["overlap_steps"])
    names += {"powersgd": ["powersgd_rank"], "topk": ["topk_share"]}.get(settings["compress"], [])
    # As a resumed run has them, which takes them from its checkpoint:
    settings["num_kv_heads"] = settings.get("num_kv_heads") or settings.get("num_heads")
    settings["hidden_dim"] = settings.get("hidden_dim") or 4 * settings.get("dmodel", 0)
    return {name: settings.get(name) for name in names}


def _per_step(run: Records) -> int | None:
    """Return the size of the global batch."""
    counts = [record[run.unit] for record in run.metrics[:2] if isinstance(record.get(run.unit), int)]
    return counts[1] - counts[0] if len(counts) == 2 else None
