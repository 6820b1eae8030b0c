"""The content of a run's page, as JSON values: every number is one of the records, or computed from them here.

A table is a caption, heads, rows, and the heads of columns in percent. Bytes, seconds and losses are numbers in these
units; `page.html` formats them.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from distlab.axes.layout import WORDS, coordinate, replica_of, replicas_in
from distlab.pipeline.actions import ActionCosts, stages_of
from distlab.pipeline.plan import Plan, in_a_row, simulate
from distlab.pipeline.rerouting import hosts_of
from distlab.pipeline.schedules import AUTO, SCHEDULES, all_stages, stages_per_worker
from distlab_page.passes import ring, time_spent, timeline
from distlab_page.planned import TIMES, costs_of, memory_of, sent_by
from distlab_page.records import Records, name_of
from distlab_page.tables import Json, evenly_spaced, table
from simplellm.errors import InputError

MOST_POINTS, MOST_ROWS = 4000, 60  # of a curve; of a table beside it
SAME_LOSS = 1e-3  # relative; larger differences are not rounding
WITHOUT = "activations without recomputation"  # counted as well, but not held: `distlab.reports.memory.WITHOUT`
IN_A_ROW, MOST_PASSES = 10, 600  # steps of a schedule whose ranks do not wait at the end of a step; their passes
NO_BUBBLE = 0.02  # what the first and the last of several steps leave
WARM_UP = 3  # steps that the planner's comparison leaves out, as `distlab_planner.prediction` does
CURVES = {
    "loss": "loss of the global batch",
    "validation_loss": "validation loss",
    "lr": "learning rate",
    "grad_norm": "norm of the gradients",
}
LOAD, LOAD_WORDS = "max_over_mean_load", "tokens of the fullest expert, relative to the mean"
BYTES = "bytes", "bytes a step", "by formula", "formula"
# The settings that make a training run what it is, whatever the layout. One that a script lacks counts as None.
TRAINING = (
    "seed lr optimizer betas weight_decay warmup_steps lr_schedule min_lr clip_norm dmodel num_heads num_kv_heads "
    "hidden_dim n_layers seq_len dtype document_mask tokenizer"
).split()
# Others that not every script and every older run has, with the value that those then have.
OTHERS: dict[str, Any] = {"outer": "none", "compress": "none", "residual": "float32"}
OTHERS |= {"experts": 0, "experts_per_token": 2, "shared_expert": False, "router_scores": "softmax", "qk_norm": False}
OTHERS |= {"capacity": 0, "balance_rate": 0.003}
CAUSE = re.compile(
    r"failed|has exited|deadlock|interrupted|terminated|lost its connection|not answer|^rank \d+( \(.*?\))? waited|"
    r"is not finite|is (nan|inf)|goes? on with step|but has not reached|out of memory|killed"
)
GOES_ON = re.compile(r"ranks? (\d[\d, and]*) goe?s? on with step (\d+)")


def contents(run: Records, other: Records | None = None, is_live: bool = False) -> Json:
    """Return all that the page of a run shows, with a second run laid over its curves."""
    pipeline = run.trace.programs if run.trace else None
    return {
        "is_live": is_live,
        "title": title_of(run),
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
    }


def in_words(run: Records) -> str:
    """Return a layout in words: "2 dp x 3 pp", "one process"."""
    return " x ".join(f"{size} {axis}" for axis, size in run.layout.items() if size > 1) or "one process"


def title_of(run: Records) -> str:
    return f"{run.name}: {in_words(run)}"


def status(run: Records) -> Json:
    """Return whether the run took all of its steps."""
    asked, done = run.settings.get("steps"), run.metrics[-1]["step"] + 1 if run.metrics else 0
    of = f"{done:,} of {asked:,} steps" if asked else f"{done:,} steps"
    if run.is_running:
        return {"state": "running", "text": f"The run goes on: {of} so far.", "steps": done}
    if asked and done < asked:
        why = next(iter(ended(run)["causes"]), None)
        return {
            "state": "ended early",
            "text": f"The run ended early, after {of}." + f" {why}" * bool(why),
            "steps": done,
        }
    return {"state": "complete", "text": f"The run is complete: {of}.", "steps": done}


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
    step, ours, its = max(pairs, key=lambda pair: abs(pair[1] - pair[2]))
    most, is_same = abs(ours - its), all(math.isclose(a, b, rel_tol=SAME_LOSS) for _, a, b in pairs)
    differ = (
        f"losses differ by at most {most:.2g} over {len(pairs):,} steps"
        if most
        else f"equal losses over {len(pairs):,} steps"
    )
    text = (
        f"The same run as {who}: {differ}." if is_same else f"Not the same losses as {who}: {differ}, in step {step}."
    )
    rows = [(step, a, b, a - b) for step, a, b in evenly_spaced(pairs, MOST_ROWS)]
    shown = table(f"Losses of both runs, {_shown(rows, pairs)}", ("step", run.name, other.name, "difference"), rows)
    return {"is_same": is_same, "text": text, "most": most, "steps": len(pairs), "table": shown}


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


def about(run: Records) -> Json:
    """Return where a run comes from."""
    config = run.config
    machine = config.get("machine", {})
    facts = {
        "command": config.get("command"),
        "folder": run.name,
        "began": config.get("began"),
        "layout": f"{in_words(run)}: {run.ranks} {'rank' if run.ranks == 1 else 'ranks'}",
        "backend": config.get("backend"),
        "data": config.get("data_because"),
        "machine": ", ".join(
            f"{value}{' cores' * (name == 'cores')}"
            for name, value in machine.items()
            if name not in ("python", "torch")
        )
        or None,
        "software": ", ".join(f"{name} {machine[name]}" for name in ("python", "torch") if name in machine) or None,
        "revision of the lab": config.get("revision"),
    }
    settings = table("All settings", ("setting", "value"), ((name, _plain(v)) for name, v in run.settings.items()))
    return {"name": run.name, "facts": {name: fact for name, fact in facts.items() if fact}, "table": settings}


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def layout(run: Records) -> Json:
    """Return where each rank stands: its pipeline's column and its replica's row; slices and parts inside."""
    axes, split = run.layout, run.config.get("layers_per_stage")
    held, ranks = _stages(run), list[Json]()
    for rank in range(run.ranks):
        worker = coordinate(axes, rank, "pp")
        stages = held[worker]
        layers = sum(split[stage] for stage in stages) if split and max(stages) < len(split) else None
        inner = coordinate(axes, rank, "cp") * axes.get("tp", 1) + coordinate(axes, rank, "tp")
        place = {"column": worker, "row": replica_of(axes, rank), "inner": inner}
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
    head = ("rank", *(f"{WORDS.get(axis) or axis}" for axis in axes), "layers")
    rows = [(r["rank"], *(coordinate(axes, r["rank"], axis) for axis in axes), r["layers"]) for r in ranks]
    return {
        "ranks": ranks,
        "words": f" {TIMES} ".join(named) or "one process",
        **sizes,
        "table": table("Ranks", head, rows),
    }


def _stages(run: Records) -> list[list[int]]:
    """Return the stages of each worker of the pipeline."""
    workers = range(run.layout.get("pp", 1))
    if run.trace and run.trace.programs:
        return run.trace.stages()
    try:
        schedule, parts = run.settings.get("schedule", "naive"), run.settings.get("micro_batches", 1)
        return [stages_of(program) for program in all_stages(schedule, len(workers), parts)]
    except InputError:  # it is of a file of the user's
        return [[worker] for worker in workers]


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
        shown.append({"name": run.name, "at": at, "values": values, "caption": _shown(records, steps)})
    return {
        "runs": shown,
        "words": {name: words for name, words in CURVES.items() if any(name in r["values"] for r in shown)},
    }


def _shown(some: Sequence[Any], every: Sequence[Any]) -> str:
    return f"{len(some):,} of {len(every):,} steps" if len(some) < len(every) else f"all {len(every):,} steps"


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
        plan, whole, in_steps = (_simulated(name, workers, *one) for one in ((own, 1), (enough, 1), (enough, steps)))
        bubbles = [one and statistics.fmean(one.bubble) for one in (plan, whole, in_steps)]
        of_own = (plan.makespan, max(plan.peak_live) / stages_per_worker(name)) if plan else (None, None)
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
    return {
        "own": run.settings.get("schedule"),
        "none": none,
        "table": table(caption, head, rows, (head[1], *head[4:])),
    }


def _simulated(schedule: str, workers: int, micro_batches: int, steps: int) -> Plan | None:
    """Return a schedule as simulated; None if it does not exist for these numbers."""
    try:
        programs = all_stages(schedule, workers, micro_batches)
    except InputError:
        return None
    stages = stages_per_worker(schedule)
    return simulate(in_a_row(programs, steps), ActionCosts(forward=1 / stages, backward=2 / stages))


def ledger(run: Records) -> Json | None:
    """Return the bytes that each rank sent, by kind with their formulas, and from rank to rank.

    A collective's bytes are divided equally between the other ranks that took part.
    """
    if len(run.ledger) < 2:
        return _ledger_of_rank_0(run)
    costs, names = costs_of(run), [account["name"] for account in run.ledger]
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)  # the ranks with the same row
    kinds: list[list[list[Any]]] = [[[] for _ in names] for _ in names]
    for account in run.ledger:
        rank, count = account["rank"], account["steps"]
        formulas = sent_by(costs, rank) if costs else {}
        by_kind: dict[str, list[Any]] = defaultdict(lambda: [0, 0, None, []])
        for sent in account["sent"]:
            kind, peers, total = sent["kind"], sent["peers"], by_kind[sent["kind"]]
            to = coordinate(run.layout, peers[0], "pp") if sent["way"] == "send" else None
            formula = formulas.get((kind, to))
            total[0] += sent["messages"]
            total[1] += sent["bytes"]
            if formula:
                total[2] = (total[2] or 0) + formula.bytes
                total[3].append(formula.words)
            for peer in peers:
                expected = formula.bytes * count / len(peers) if formula else None
                kinds[rank][peer].append([kind, sent["bytes"] / len(peers), expected])
        for kind, (messages, size, expected, words) in by_kind.items():
            each = size / count if count else None
            alike[kind, messages, size, each, expected, " + ".join(words)].append(rank)
    most = {kind: max(row[2] for row in alike if row[0] == kind) for kind, *_ in alike}
    rows = [(row[0], ", ".join(map(str, ranks)), *row[1:]) for row, ranks in alike.items()]
    rows.sort(key=lambda row: (-most[row[0]], row[0]))
    head = ("kind", "ranks", "messages", *BYTES)
    pairs = [
        (name, names[peer], *sent)
        for name, line in zip(names, kinds, strict=True)
        for peer, here in enumerate(line)
        for sent in here
    ]
    steps = f"in {run.ledger[0]['steps']:,} steps"
    return {
        "table": table(f"Bytes that each of these ranks sent {steps}, by kind", head, rows),
        "matrix": [[sum(size for _, size, _ in here) for here in line] for line in kinds],
        "kinds": kinds,
        "ranks": names,
        "pairs": table(f"Bytes from rank to rank {steps}", ("from", "to", "kind", "bytes", "by formula"), pairs),
        "has_formulas": costs is not None,
    }


def _ledger_of_rank_0(run: Records) -> Json | None:
    """Return the bytes that rank 0 sent in the recorded steps: all that a run has that did not reach its end."""
    totals: dict[str, int] = defaultdict(int)
    for record in run.metrics:
        for kind, size in record.get("sent_bytes", {}).items():
            totals[kind] += size
    if not totals:
        return None
    costs, planned = costs_of(run), dict[str, tuple[int, str]]()
    for (kind, _), formula in sent_by(costs, 0).items() if costs else ():
        size, words = planned.get(kind, (0, ""))
        planned[kind] = size + formula.bytes, " + ".join(filter(None, (words, formula.words)))
    rows = [(kind, size, size / len(run.metrics), *planned.get(kind, (None, ""))) for kind, size in totals.items()]
    caption = "Bytes that rank 0 sent (the other ranks report theirs at the end)"
    return {"table": table(caption, ("kind", *BYTES), rows), "matrix": None}


def memory(run: Records) -> Json | None:
    """Return the bytes that each rank held, by kind, beside the plan."""
    if not run.memory or len(run.memory) != run.ranks:
        return None
    costs = costs_of(run)
    kinds = [kind for kind in run.memory[0] if kind != WITHOUT and any(rank.get(kind) for rank in run.memory)]
    planned = [memory_of(costs, rank) for rank in range(run.ranks)] if costs else None
    names = [name_of(run, rank) for rank in range(run.ranks)]
    rows = [
        (names[rank], kind, held[kind], planned[rank].get(kind) if planned else None)
        for rank, held in enumerate(run.memory)
        for kind in kinds
    ]
    bars = {kind: [held[kind] for held in run.memory] for kind in kinds}
    plan = {kind: [held.get(kind, 0) for held in planned] for kind in kinds} if planned else None
    return {
        "ranks": names,
        "bars": bars,
        "plan": plan,
        "table": table("Bytes held at the peak", ("rank", "kind", "held", "by the plan"), rows),
    }


def prediction(run: Records) -> Json | None:
    """Return the predicted and the measured time of a step on rank 0, with `--machine`."""
    predicted = run.config.get("predicted_seconds")
    records = [record for record in run.metrics if "waited_seconds" in record]
    records = records[WARM_UP:] or records
    if not predicted or not records:
        return None
    seconds, waited, collective = (
        statistics.fmean(record[name] for record in records)
        for name in ("seconds", "waited_seconds", "collective_seconds")
    )
    measured = {
        "step": seconds,
        "computing": seconds - waited,
        "collectives": collective,
        "waiting for messages": waited - collective,
    }
    rows = [(what, predicted[what], measured[what], predicted[what] - measured[what]) for what in measured]
    head = ("of a step", "predicted", "measured", "difference")
    caption = f"Seconds of a step on rank 0, mean of {len(records):,} steps"
    return {"table": table(caption, head, rows), "parts": [row[:3] for row in rows]}


def experts(run: Records) -> Json | None:
    """Return the load of the fullest expert in each step."""
    records = [record for record in run.metrics if LOAD in record]
    if not records:
        return None
    shown = evenly_spaced(records, MOST_POINTS)
    steps, loads = [r["step"] + 1 for r in shown], [r[LOAD] for r in shown]
    rows = evenly_spaced([*zip(steps, loads, strict=True)], MOST_ROWS)
    caption = f"Load, {_shown(rows, records)}"
    return {"steps": steps, "loads": loads, "table": table(caption, ("step", LOAD_WORDS), rows)}


def detours(run: Records) -> Json | None:
    """Return who has done the work of dead ranks of pipelines, and from which step on."""
    workers, parts, pipelines = run.layout.get("pp", 1), run.settings.get("micro_batches", 1), run.layout.get("dp", 1)
    given, rows = run.settings.get("repair", "off"), dict[tuple[int, str, str], list[int]]()
    slices = run.layout.get("tp", 1)  # ranks with the same layers: they die together, and count as one worker
    repairs = {found.groups() for lines in run.logs.values() for line in lines if (found := GOES_ON.search(line))}
    for names, step in repairs if given != "off" and workers > 1 else ():
        alive = {int(number) // slices for number in re.findall(r"\d+", names)}
        for (worker, part), host in hosts_of(workers, parts, pipelines, alive, given == "exact").items():
            own = part // parts * workers + worker
            for number in range(slices if own != host else 0):
                dead, other = (name_of(run, one * slices + number) for one in (own, host))
                rows.setdefault((int(step), dead, other), []).append(part % parts)
    shown = [(step, own, ", ".join(map(str, numbers)), host) for (step, own, host), numbers in sorted(rows.items())]
    head = ("from step", "work of", "micro-batches", "done by")
    return table("Detours around dead ranks", head, shown) if shown else None


def ended(run: Records) -> Json:
    """Return what the launcher and the ranks report about deaths and waits, and their last lines."""
    causes, waits = dict[str, None](), list[str]()
    for who, lines in run.logs.items():
        for number, line in enumerate(lines):
            if line.startswith("who waits for whom"):
                block = [line, *(later for later in _while_indented(lines[number + 1 :]))]
                waits = max(waits, block, key=len)
            elif who == "launcher" or (CAUSE.search(line) and not line.startswith(" ")):
                causes[line] = None
    return {
        "causes": [*causes],
        "waits": waits,
        "detours": detours(run),
        "logs": [[who, *lines[-200:]] for who, lines in run.logs.items() if lines],
    }


def _while_indented(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith(" "):
            return
        yield line
