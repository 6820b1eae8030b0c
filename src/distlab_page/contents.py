"""The content of a run's page, as JSON values: every number is one of the records, or computed from them here.

A table is a caption, heads, rows, and the heads of columns in percent. Bytes, seconds and losses are numbers in these
units; `page.html` formats them.
"""

import statistics
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from distlab.axes.layout import AXIS_WORDS, coordinate, replica_of, replicas_in
from distlab.pipeline.actions import ActionCosts, stages_of
from distlab.pipeline.plan import Plan, in_a_row, simulate
from distlab.pipeline.schedules import AUTO, DEFAULT_CHUNKS, SCHEDULES, all_stages, stages_per_worker
from distlab.run.terminal import counted
from distlab_page.beside_plans import ledger, memory, prediction
from distlab_page.ends import ended
from distlab_page.passes import ring, time_spent, timeline
from distlab_page.records import Records, in_words, name_of
from distlab_page.tables import MOST_ROWS, Json, evenly_spaced, shown_of, table
from distlab_page.verdict import verdict
from distlab_planner.exchanges import TIMES
from simplellm.errors import InputError

MOST_POINTS = 4000  # of a curve
IN_A_ROW, MOST_PASSES = 10, 600  # steps of a schedule whose ranks do not wait at the end of a step; their passes
NO_BUBBLE = 0.02  # what the first and the last of several steps leave
CURVES = {
    "loss": "loss of the global batch",
    "validation_loss": "validation loss",
    "lr": "learning rate",
    "grad_norm": "norm of the gradients",
}
LOAD, LOAD_WORDS = "max_over_mean_load", "tokens of the fullest expert, relative to the mean"


def contents(run: Records, other: Records | None = None, is_live: bool = False) -> Json:
    """Return all that the page of a run shows, with a second run laid over its curves."""
    pipeline = run.trace.programs if run.trace else None
    return {
        "is_live": is_live,
        "title": f"{run.name}: {in_words(run)}",
        "status": status(run),
        "verdict": verdict(run, other) if other else None,
        "about": [about(one) for one in (run, other) if one],
        "layout": layout(run),
        "curves": curves([one for one in (run, other) if one]),
        "timeline": timeline(run.trace) if run.trace else None,
        "schedules": schedules(run) if pipeline or run.layout.get("pp", 1) > 1 else None,
        "time": time_spent(run),
        "ledger": ledger(run),
        "memory": memory(run),
        "prediction": prediction(run),
        "experts": experts(run),
        "ring": ring(run.trace) if run.trace else None,
        "ended": ended(run),
        "missing": missing(run),
    }


def missing(run: Records) -> dict[str, str]:
    """Return, by panel, why it is empty if it is."""
    at_the_end, too_early = (
        "The ranks report this at the end of the run.",
        "The run ended before its ranks reported this.",
    )
    why = dict.fromkeys(("timeline", "memory"), at_the_end if run.is_running else too_early)
    if run.repairs and run.state == "complete":
        why["timeline"] = "No step came after the last repair, so the run has no trace of one."
    if not run.settings.get("trace"):
        why["timeline"] = "The run has no trace: it needs --trace."
    if run.memory:
        why["memory"] = f"The counts of {len(run.memory)} ranks are recorded, but not which ranks these are."
    elif run.state == "complete":
        why["memory"] = "The run did not count its memory."
    sent = f"The run {'has not recorded a step yet' if run.is_running else 'ended before it recorded a step'}."
    sent = "One process sends nothing." if run.ranks == 1 else sent
    return why | {"time": "The run has no records of its time.", "ledger": sent}


def status(run: Records) -> Json:
    """Return whether the run took all of its steps."""
    asked, done, state = run.settings.get("steps"), run.steps, run.state
    of = f"{done:,} of {asked:,} steps" if asked else f"{done:,} steps"
    why = next(iter(ended(run)["causes"]), None)
    repaired = f", {counted(len(run.repairs), 'repairs')}" * bool(run.repairs)
    text = {
        "running": f"The run goes on: {of} so far.",
        "ended early": f"The run ended early, after {of}."
        + (f" {why[0].upper()}{why[1:].rstrip('.')}." if why else ""),
        "complete": f"The run is complete: {of}{repaired}.",
    }[state]
    return {"state": state, "text": text, "steps": done}


def about(run: Records) -> Json:
    """Return where a run comes from."""
    config = run.config
    machine = config.get("machine", {})
    facts = {
        "command": config.get("command"),
        "folder": run.name,
        "began": config.get("began"),
        "layout": f"{in_words(run)}: {counted(run.ranks, 'ranks')}",
        "backend": config.get("backend"),
        "data": config.get("data_because"),
        "machine": ", ".join(
            f"{value}{' cores' * (name == 'cores')}"
            for name, value in machine.items()
            if name not in ("python", "torch")
        ),
        "software": ", ".join(f"{name} {machine[name]}" for name in ("python", "torch") if name in machine),
        "revision of the lab": config.get("revision"),
    }
    settings = table("All settings", ("setting", "value"), ((name, _plain(v)) for name, v in run.settings.items()))
    return {"name": run.name, "facts": {name: fact for name, fact in facts.items() if fact}, "table": settings}


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def layout(run: Records) -> Json:
    """Return where each rank stands: its pipeline's column and its replica's row; slices and parts inside."""
    axes, split = run.layout, run.config.get("layers_per_stage")
    held, dead, ranks = _stages(run), run.dead, list[Json]()
    for rank in range(run.ranks):
        worker = coordinate(axes, rank, "pp")
        stages = held[worker]
        layers = sum(split[stage] for stage in stages) if split and max(stages) < len(split) else None
        inner = coordinate(axes, rank, "cp") * axes.get("tp", 1) + coordinate(axes, rank, "tp")
        place = {"column": worker, "row": replica_of(axes, rank), "inner": inner, "died": rank in dead}
        ranks.append({"rank": rank, "name": name_of(run, rank), **place, "stages": stages, "layers": layers})
    words = {
        "dp": "replicas",
        "pp": "stages",
        "cp": "parts of each sequence",
        "ep": "shares of the experts",
        "tp": "slices of each layer",
    }
    named = [f"{size} {words.get(axis, axis)}" for axis, size in axes.items() if size > 1]
    sizes = {"columns": axes.get("pp", 1), "rows": replicas_in(axes), "inner": axes.get("cp", 1) * axes.get("tp", 1)}
    head = ("rank", *(f"{AXIS_WORDS.get(axis) or axis}" for axis in axes), "layers", *(["end"] if dead else []))
    ends = [["died" if r["died"] else ""] * bool(dead) for r in ranks]
    rows = [
        (r["rank"], *(coordinate(axes, r["rank"], axis) for axis in axes), r["layers"], *end)
        for r, end in zip(ranks, ends, strict=True)
    ]
    in_all = f" {TIMES} ".join(named) or "one process"
    return {"ranks": ranks, "words": in_all, **sizes, "table": table("Ranks", head, rows)}


def _stages(run: Records) -> list[list[int]]:
    """Return the stages of each worker of the pipeline."""
    workers = range(run.layout.get("pp", 1))
    if run.trace and run.trace.programs:
        return run.trace.stages()
    try:
        schedule, parts = run.settings.get("schedule", "naive"), run.settings.get("micro_batches", 1)
        held = _stages_per_worker(run, schedule)
        return [stages_of(program) for program in all_stages(schedule, len(workers), parts, held)]
    except InputError:  # it is of a file of the user's
        return [[worker] for worker in workers]


def _stages_per_worker(run: Records, schedule: str) -> int:
    """Return how many stages each worker has in a schedule: as many as in this run, where a run chooses the number."""
    return stages_per_worker(schedule, run.settings.get("chunks_per_stage", DEFAULT_CHUNKS))


def curves(runs: Sequence[Records]) -> Json:
    """Return the records of each step of each run; of a long run some, and all with a validation loss."""
    shown = []
    for run in runs:
        seconds = accumulate(record["seconds"] for record in run.metrics)
        steps = [{**record, "so_far": at} for record, at in zip(run.metrics, seconds, strict=True)]
        validated = evenly_spaced([record for record in steps if "validation_loss" in record], MOST_POINTS)
        kept = {record["step"]: record for record in (*evenly_spaced(steps, MOST_POINTS), *validated)}
        records = [kept[step] for step in sorted(kept)]
        values = {name: [r.get(name) for r in records] for name in CURVES if any(name in r for r in records)}
        at = {
            "steps": [r["step"] + 1 for r in records],
            run.unit: [r.get(run.unit) for r in records],
            "seconds": [r["so_far"] for r in records],
        }
        shown.append({"name": run.name, "at": at, "values": values, "caption": shown_of(records, steps)})
    return {
        "runs": shown,
        "words": {name: words for name, words in CURVES.items() if any(name in r["values"] for r in shown)},
    }


def schedules(run: Records) -> Json:
    """Return the bubble of each schedule for this pipeline, if its stages were equal and messages free.

    For the run's micro-batches, for twice as many as workers, which all schedules can have, and for these in steps in
    a row whose ranks do not wait at the end of a step.
    """
    workers, own = run.layout.get("pp", 1), run.settings.get("micro_batches", 1)
    enough = 2 * workers
    steps = max(2, min(IN_A_ROW, MOST_PASSES // (workers * enough)))  # so that a large pipeline takes no longer
    rows = list[tuple[Any, ...]]()
    for name in SCHEDULES:
        if name == AUTO:  # searched for when a run begins
            continue
        held, sizes = _stages_per_worker(run, name), ((own, 1), (enough, 1), (enough, steps))
        plan, whole, in_steps = (simulated(name, workers, parts, count, held) for parts, count in sizes)
        bubbles = [one and statistics.fmean(one.bubble) for one in (plan, whole, in_steps)]
        of_own = (plan.makespan, max(plan.peak_live) / held) if plan else (None, None)
        rows.append((name, bubbles[0], *of_own, *bubbles[1:]))
    rows.sort(key=lambda row: 1.0 if row[5] is None else row[5])
    head = (
        "schedule",
        "bubble",
        "time of a step (forward pass = 1)",
        "micro-batches kept",
        f"bubble, {enough} micro-batches",
        f"bubble, {enough} micro-batches, {steps} steps that run on",
    )
    caption = f"The same pipeline ({workers} workers, {own} micro-batches) in other orders, by simulation"
    none = [row[0] for row in rows if row[5] is not None and row[5] < NO_BUBBLE]
    shown = table(caption, head, rows, (head[1], *head[4:]))
    return {"own": run.settings.get("schedule"), "none": none, "table": shown}


def simulated(schedule: str, workers: int, micro_batches: int, steps: int, chunks: int = DEFAULT_CHUNKS) -> Plan | None:
    """Return a schedule as simulated, with equal passes; None if it does not exist for these numbers.

    Each worker holds `chunks` stages, if the schedule lets the run choose.
    """
    try:
        programs = all_stages(schedule, workers, micro_batches, chunks)
    except InputError:
        return None
    stages = stages_per_worker(schedule, chunks)
    return simulate(in_a_row(programs, steps), ActionCosts(forward=1 / stages, backward=2 / stages))


def experts(run: Records) -> Json | None:
    """Return the load of the fullest expert in each step."""
    records = [record for record in run.metrics if LOAD in record]
    if not records:
        return None
    shown = evenly_spaced(records, MOST_POINTS)
    steps, loads = [r["step"] + 1 for r in shown], [r[LOAD] for r in shown]
    rows = evenly_spaced([*zip(steps, loads, strict=True)], MOST_ROWS)
    caption = f"Load, {shown_of(rows, records)}"
    return {"steps": steps, "loads": loads, "table": table(caption, ("step", LOAD_WORDS), rows)}
