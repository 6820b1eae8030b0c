"""The verdict on two runs: are they the same training run, and how far do their losses differ?"""

import math
from collections.abc import Iterator
from typing import Any

from distlab_page.records import Records, in_words
from distlab_page.tables import MOST_ROWS, Json, evenly_spaced, shown_of, table

# Relative differences of losses: up to the first, the runs are the same but for the order in which they add; up to the
# second, rounding of many steps may have added up, but a small fault looks alike.
BOUNDS = {"float32": (1e-5, 1e-3), "bfloat16": (2e-3, 2e-2)}
# The settings that make a training run what it is, whatever the layout. One that a script lacks counts as None.
TRAINING = (
    "seed lr optimizer betas weight_decay warmup_steps lr_schedule min_lr clip_norm dmodel num_heads num_kv_heads "
    "hidden_dim n_layers seq_len dtype document_mask tokenizer"
).split()
# Others that not every script and every older run has, with the value that those then have.
OTHERS: dict[str, Any] = {"outer": "none", "compress": "none", "residual": "float32"}
OTHERS |= {"experts": 0, "experts_per_token": 2, "shared_expert": False, "router_scores": "softmax", "qk_norm": False}
OTHERS |= {"capacity": 0, "balance_rate": 0.003}


def verdict(run: Records, other: Records) -> Json:
    """Return whether two runs are the same training run, by their settings, their batches and their losses."""
    who = "one process" if other.ranks == 1 else f"{other.name} ({in_words(other)})"
    reasons = [f"{name} {ours} and {theirs}" for name, ours, theirs in _different_settings(run, other)]
    if reasons:
        return {"is_same": None, "text": f"Not the same training run as {who}: {'; '.join(reasons)}.", "table": None}
    theirs = {record["step"]: record["loss"] for record in other.metrics}
    pairs = [(r["step"], r["loss"], theirs[r["step"]]) for r in run.metrics if r["step"] in theirs]
    pairs = [pair for pair in pairs if pair[1] is not None and pair[2] is not None]
    if not pairs:
        return {"is_same": None, "text": f"Nothing to compare with {who}: the runs share no step.", "table": None}
    dtype = run.settings.get("dtype", "float32")
    same, close = BOUNDS.get(dtype, BOUNDS["float32"])
    most, over = max(abs(a - b) for _, a, b in pairs), f"{len(pairs):,} steps"
    worst, step = max((_relative(a, b), step) for step, a, b in pairs)
    differ = f"losses differ by at most {most:.2g} over {over}"
    if worst <= same:
        text = f"The same run as {who}: {differ if most else f'equal losses over {over}'}."
    elif worst <= close:
        text = (
            f"Close to {who}, but not the same run: {differ}, in step {step} by {worst:.2g} of the loss, more than the "
            f"{same:g} of rounding in {dtype}. ./launch.sh compare {run.folder} {other.folder} finds the first "
            "difference, in runs with --record-gradients."
        )
    else:
        text = f"Not the same losses as {who}: {differ}, in step {step} by {worst:.2g} of the loss."
    rows = [(step, a, b, a - b) for step, a, b in evenly_spaced(pairs, MOST_ROWS)]
    head = ("step", run.name, other.name, "difference")
    shown = table(f"Losses of both runs, {shown_of(rows, pairs)}", head, rows)
    return {"is_same": worst <= same, "text": text, "most": most, "steps": len(pairs), "table": shown}


def _relative(ours: float, theirs: float) -> float:
    """Return the relative difference of two losses; infinite if one of them is not a number."""
    if ours == theirs:
        return 0.0
    difference = abs(ours - theirs) / max(abs(ours), abs(theirs))
    return difference if math.isfinite(difference) else math.inf


def _different_settings(run: Records, other: Records) -> Iterator[tuple[str, Any, Any]]:
    for name in TRAINING:
        if run.settings.get(name) != other.settings.get(name):
            yield name, run.settings.get(name), other.settings.get(name)
    for name, usual in OTHERS.items():
        pair = run.settings.get(name, usual), other.settings.get(name, usual)
        if pair[0] != pair[1]:
            yield name, *pair
    if run.sync_every != other.sync_every:
        yield "sync_every", run.sync_every, other.sync_every
    if run.config.get("data") != other.config.get("data"):
        yield "data", run.config.get("data"), other.config.get("data")
    batches = _per_step(run), _per_step(other)
    if None not in batches and batches[0] != batches[1]:
        yield f"{run.unit} in a step", *batches


def _per_step(run: Records) -> int | None:
    """Return the size of the global batch."""
    counts = [record[run.unit] for record in run.metrics[:2] if run.unit in record]
    return counts[1] - counts[0] if len(counts) == 2 else None
