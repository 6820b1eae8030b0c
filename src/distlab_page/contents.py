"""The content of a run's page, as JSON values: every number is one of the records, or computed from them here.

A table is a caption, heads, rows, and the heads of columns in percent. Bytes, seconds and losses are numbers in these
units; `page.html` formats them.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from distlab.axes.layout import WORDS, coordinate, describe_rank, ranks_along, replica_of, replicas_in
from distlab.comm.recorder import COMPUTE, PART, SEND, STEP, WAIT, Event
from distlab.pipeline.actions import KINDS, ActionCosts, labels, stages_of
from distlab.pipeline.engine import Engine, Graph
from distlab.pipeline.plan import Plan, in_a_row, simulate
from distlab.pipeline.schedules import AUTO, SCHEDULES, all_stages, stages_per_worker
from distlab.reports import style
from distlab.reports.trace import Trace
from distlab_page.planned import TIMES, costs_of, memory_of, sent_by
from distlab_page.records import Records
from simplellm.errors import InputError

Json = dict[str, Any]
MOST_POINTS = 4000  # of a curve
MOST_BARS = 9000  # of all steps of a timeline together
SAME_LOSS = 1e-3  # relative; larger differences are not rounding
WITHOUT = "activations without recomputation"  # counted as well, but not held: `distlab.reports.memory.WITHOUT`
IN_A_ROW, MOST_PASSES = 10, 600  # steps of a schedule whose ranks do not wait at the end of a step; their passes
MOST_STEPS = 600  # of all ranks together, that factors of efficiency are computed from
NO_BUBBLE = 0.02  # what the first and the last of several steps leave
WARM_UP = 3  # steps that the planner's comparison leaves out, as `distlab_planner.prediction` does
CURVES = {
    "loss": "loss of the global batch",
    "validation_loss": "validation loss",
    "lr": "learning rate",
    "grad_norm": "norm of the gradients",
}
LOAD, LOAD_WORDS = "max_over_mean_load", "tokens of the fullest expert, relative to the mean"
# The settings that make a training run what it is, whatever the layout. One that a script lacks counts as None.
TRAINING = (
    "seed lr optimizer betas weight_decay warmup_steps lr_schedule min_lr clip_norm dmodel num_heads num_kv_heads "
    "hidden_dim n_layers seq_len dtype document_mask tokenizer"
).split()
OTHER_ALGORITHMS = {"sync_every": None, "outer": "none", "compress": "none", "experts": 0}
CAUSE = re.compile(
    r"failed|has exited|deadlock|interrupted|terminated|lost its connection|not answer|^rank \d+( \(.*?\))? waited|"
    r"is not finite|is (nan|inf)|goes? on with step|but has not reached|out of memory|killed"
)


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


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]], shares: Sequence[str] = ()) -> Json:
    """Return a table; the columns `shares` are shown in percent."""
    return {"caption": caption, "head": [*head], "rows": [[*row] for row in rows], "shares": [*shares]}


def name_of(run: Records, rank: int) -> str:
    """Return the name of a rank, as messages have it."""
    if run.ledger:
        return str(run.ledger[rank]["name"])
    return run.trace.describe(rank) if run.trace else describe_rank(run.layout, rank)


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
    rows = [(step, a, b, a - b) for step, a, b in _some(pairs, 60)]
    shown = table("Losses of both runs", ("step", run.name, other.name, "difference"), rows)
    return {"is_same": is_same, "text": text, "most": most, "steps": len(pairs), "table": shown}


def _different_settings(run: Records, other: Records) -> Iterator[tuple[str, Any, Any]]:
    for name in TRAINING:
        if run.settings.get(name) != other.settings.get(name):
            yield name, run.settings.get(name), other.settings.get(name)
    for name, usual in OTHER_ALGORITHMS.items():
        pair = run.settings.get(name, usual), other.settings.get(name, usual)
        if pair[0] != pair[1]:
            yield name, *pair
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
        return [stages_of(program) for program in run.trace.programs]
    try:
        schedule, parts = run.settings.get("schedule", "naive"), run.settings.get("micro_batches", 1)
        return [stages_of(program) for program in all_stages(schedule, len(workers), parts)]
    except InputError:  # it is of a file of the user's
        return [[worker] for worker in workers]


def curves(runs: Sequence[Records]) -> Json:
    """Return the records of each step of each run, thinned if there are many."""
    shown = []
    for run in runs:
        seconds = accumulate(record["seconds"] for record in run.metrics)
        records = _some(
            [{**record, "so_far": at} for record, at in zip(run.metrics, seconds, strict=True)], MOST_POINTS
        )
        values = {name: [r.get(name) for r in records] for name in CURVES if any(name in r for r in records)}
        at = {
            "steps": [r["step"] + 1 for r in records],
            run.unit: [r.get(run.unit) for r in records],
            "seconds": [r["so_far"] for r in records],
        }
        shown.append({"name": run.name, "at": at, "values": values})
    return {
        "runs": shown,
        "words": {name: words for name, words in CURVES.items() if any(name in r["values"] for r in shown)},
    }


def timeline(trace: Trace) -> Json:
    """Return the events of each step, in ms since its first one, and the plan from the measured times of passes.

    A bar is [rank, kind, name, start, length]; kinds and names are numbers of entries in lists. An arrow is [sender,
    start, receiver, end, name] of a message.
    """
    plan, steps = trace.plan(), trace.steps()
    names, kinds = _Numbers(), _Numbers()
    bars_of_one = sum(len(_bars(trace, rank, event)) for rank, event in enumerate(steps[0]))
    kept = _some(list(enumerate(steps)), max(1, MOST_BARS // max(1, bars_of_one)))
    lengths = [step[0].seconds for _, step in kept]
    shown = []
    for _, step in kept:
        origin = min(event.start for event in step)
        if plan is not None:  # the plan begins with the first pass
            origin = min(e.start for rank, own in enumerate(step) for e in trace.ranks[rank].within(own, COMPUTE))
        bars = list[list[Any]]()
        sends, waits = dict[str, tuple[int, Event]](), dict[str, tuple[int, Event]]()
        for rank, own in enumerate(step):
            for event in _bars(trace, rank, own):
                start, length = _ms(event.start - origin), _ms(event.seconds)
                bars.append([rank, kinds[_kind(event)], names[event.name], start, length])
            sends |= {e.flow: (rank, e) for e in trace.ranks[rank].within(own, SEND) if e.flow}
            waits |= {e.flow: (rank, e) for e in trace.ranks[rank].within(own, WAIT) if e.flow}
        arrows = [
            [sender, _ms(send.start - origin), waits[flow][0], _ms(waits[flow][1].end - origin), names[send.name]]
            for flow, (sender, send) in sends.items()
            if flow in waits
        ]
        label = step[0].name
        shown.append({"label": label, "ms": _ms(step[0].seconds), "bars": bars, "arrows": arrows})
    planned = list[list[Any]]()
    if plan is not None:
        for rank in range(len(trace.ranks)):
            for span in plan.spans[trace.worker(rank)]:
                label = plan.labels[span.action]
                planned.append([rank, kinds[label[0]], names[label], _ms(span.start), _ms(span.end - span.start)])
    busy = [trace.busy(rank) for rank in range(len(trace.ranks))]
    bubble = plan.bubble if plan else None
    head = ("rank", "busy", "waiting", *(["bubble in the plan"] if bubble else []))
    rows = [(trace.describe(r), *busy[r], *([bubble[trace.worker(r)]] if bubble else [])) for r in range(len(busy))]
    return {
        "ranks": [trace.describe(rank) for rank in range(len(trace.ranks))],
        "kinds": [{"key": kind, **_look(kind)} for kind in kinds.entries],
        "names": names.entries,
        "steps": shown,
        "of_steps": len(steps),
        "typical": sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2],
        "slowest": max(range(len(lengths)), key=lengths.__getitem__),
        "plan": planned,
        "plan_ms": _ms(plan.makespan) if plan else None,
        "idle": {
            "plan": statistics.fmean(bubble) if bubble else None,
            "measured": 1 - statistics.fmean(b for b, _ in busy),
        },
        "table": table(
            "Busy and waiting, as shares of the time from the first to the last pass, all steps", head, rows, head[1:]
        ),
    }


class _Numbers:
    """Numbers for texts, in the order in which they are first asked for."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._numbers: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.entries)
            self.entries.append(text)
        return self._numbers[text]


def _bars(trace: Trace, rank: int, step: Event) -> list[Event]:
    recorded = trace.ranks[rank]
    passes = recorded.within(step, COMPUTE) or [step]
    return [*passes, *recorded.within(step, PART), *recorded.within(step, WAIT)]


def _kind(event: Event) -> str:
    """Return a bar's kind: an action's letter, or "compute", "part", "wait"."""
    if event.kind == COMPUTE and event.name[0] in KINDS:
        return event.name[0]
    return {WAIT: "wait", PART: "part", STEP: "compute"}.get(event.kind, "compute")


def _look(kind: str) -> Json:
    """Return the words and the color of a kind; the palette is safe for color-blind readers."""
    others = {
        "wait": ("waiting for other ranks", "#bbbbbb"),
        "part": ("part of a computation", style.PURPLE),
        "compute": ("computing", style.SKY),
    }
    if kind in others:
        words, color = others[kind]
        return {"words": words, "color": color}
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", KINDS[kind].__name__).lower()
    return {"words": f"{kind}: {words}", "color": KINDS[kind].color}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


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


def time_spent(run: Records) -> Json | None:
    """Return what each rank did in its steps; with a trace, also three factors of efficiency."""
    rows: list[tuple[float, ...]]
    head: tuple[str, ...]
    if run.trace is not None:
        rows = [_spent(run.trace, rank) for rank in range(len(run.trace.ranks))]
        head = ("computing", "waiting", "sending", "other work")
        caption, source = "Seconds in all steps of the trace but the first, by rank", "trace.json"
    elif run.ledger:
        rows = [
            (r["seconds"] - r["waited_seconds"], r["waited_seconds"] - r["collective_seconds"], r["collective_seconds"])
            for r in run.ledger
        ]
        head = ("computing", "waiting for messages", "in collectives")
        caption, source = "Seconds in all steps, by rank", "ledger.json"
    elif run.metrics and "waited_seconds" in run.metrics[0]:
        whole, waited, collective = (
            sum(record[name] for record in run.metrics) for name in ("seconds", "waited_seconds", "collective_seconds")
        )
        rows = [(whole - waited, waited - collective, collective)]
        head = ("computing", "waiting for messages", "in collectives")
        caption, source = "Seconds in all steps of rank 0 (the other ranks report theirs at the end)", "metrics.jsonl"
    else:
        return None
    names = [name_of(run, rank) for rank in range(len(rows))]
    shown = table(caption, ("rank", *head), ((name, *row) for name, row in zip(names, rows, strict=True)))
    factors = efficiency(run.trace) if run.trace else None
    return {"ranks": names, "head": head, "rows": rows, "source": source, "table": shown, "factors": factors}


def _spent(trace: Trace, rank: int) -> tuple[float, float, float, float]:
    """Return the seconds that a rank computed, waited, sent, and did anything else, in all steps."""
    computed = waited = sent = total = 0.0
    recorded, is_pipeline = trace.ranks[rank], trace.programs is not None
    for step in trace.steps():
        own = step[rank]
        waits, sends = recorded.within(own, WAIT), recorded.within(own, SEND)
        passes = recorded.within(own, COMPUTE) or ([] if is_pipeline else [own])
        # A rank may wait while it sends, and do both within a pass.
        sending = _seconds(sends) - _seconds(_inside(waits, sends))
        within = _inside(sends, passes)
        sending_within = _seconds(within) - _seconds(_inside(waits, within))
        computed += _seconds(passes) - _seconds(_inside(waits, passes)) - sending_within
        waited += _seconds(waits)
        sent += sending
        total += own.seconds
    return computed, waited, sent, total - computed - waited - sent


def _inside(events: Sequence[Event], outer: Sequence[Event]) -> list[Event]:
    """Return the events that begin during one of others."""
    return [event for event in events if any(other.start <= event.start < other.end for other in outer)]


def _seconds(events: Sequence[Event]) -> float:
    return sum(event.seconds for event in events)


def efficiency(trace: Trace) -> Json | None:
    """Return how much of the ranks' time computes, as a product of three factors; None if they computed nothing.

    They are those of the POP project ("POP standard metrics for parallel performance analysis", 2016): load balance,
    mean over largest computing time; serialisation, what dependencies leave if messages were free; transfer, the rest:
    messages, and waits for cores. Of a long run, evenly spaced steps count.
    """
    steps, ranks = _some(trace.steps(), max(1, MOST_STEPS // len(trace.ranks))), range(len(trace.ranks))
    computing = [[_computing(trace, rank, step[rank]) for rank in ranks] for step in steps]
    by_rank = [sum(own[rank] for own in computing) for rank in ranks]
    ideal = _ideal_seconds(trace, steps) if trace.programs else sum(map(max, computing))
    taken = sum(_length(trace, step) for step in steps)
    most = max(by_rank)
    if not (most and ideal and taken):
        return None
    factors = {
        "load balance": statistics.fmean(by_rank) / most,
        "serialisation": most / ideal,
        "transfer": ideal / taken,
        "all three: efficiency": statistics.fmean(by_rank) / taken,
    }
    means = {
        "load balance": "mean computing time of the ranks / that of the busiest",
        "serialisation": "computing time of the busiest / time of the steps with free messages",
        "transfer": "time of the steps with free messages / time that they took",
        "all three: efficiency": "mean computing time of the ranks / time that the steps took",
    }
    seconds = {"mean": statistics.fmean(by_rank), "busiest": most, "free messages": ideal, "taken": taken}
    rows = [(name, factor, means[name]) for name, factor in factors.items()]
    shown = table("Factors of efficiency", ("factor", "share", "computed as"), rows, ["share"])
    return {"seconds": seconds, "table": shown}


def _ideal_seconds(trace: Trace, steps: Sequence[Sequence[Event]]) -> float:
    """Return the time of the steps if messages were free: each pipeline plays its passes, with the times they took."""
    assert trace.programs is not None
    graph, names, total = Graph(trace.programs), labels(trace.programs), 0.0
    workers = [(trace.worker(rank), recorded) for rank, recorded in enumerate(trace.ranks)]

    def play(taken: dict[tuple[int, str], float]) -> float:
        return Engine(graph, lambda action: taken.get((graph.owners[action.stage], names[action]), 0.0)).makespan

    for step in steps:
        played = []
        for ranks in ranks_along(trace.layout, ["pp"]):
            taken = {}
            for worker, recorded, own in ((*workers[rank], step[rank]) for rank in ranks):
                waits = recorded.within(own, WAIT)
                for event in recorded.within(own, COMPUTE):
                    taken[worker, event.name] = event.seconds - _seconds(_inside(waits, [event]))
            played.append(play(taken))
        total += max(played)
    return total


def _computing(trace: Trace, rank: int, step: Event) -> float:
    """Return the seconds that a rank computes in the passes of a step."""
    recorded = trace.ranks[rank]
    passes = recorded.within(step, COMPUTE) or [step]
    return _seconds(passes) - _seconds(_inside(recorded.within(step, WAIT), passes))


def _length(trace: Trace, step: Sequence[Event]) -> float:
    """Return the seconds from the first to the last pass of a step."""
    passes = [e for rank, own in enumerate(step) for e in trace.ranks[rank].within(own, COMPUTE) or [own]]
    return max(e.end for e in passes) - min(e.start for e in passes)


def ledger(run: Records) -> Json | None:
    """Return the bytes that each rank sent, by kind with their formulas, and from rank to rank.

    A collective's bytes are divided equally between the other ranks that took part.
    """
    if len(run.ledger) < 2:
        return _ledger_of_rank_0(run)
    costs = costs_of(run)
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)  # the ranks with the same row
    to: dict[tuple[int, int], float] = defaultdict(float)
    kinds: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for account in run.ledger:
        rank, steps = account["rank"], account["steps"]
        formulas = sent_by(costs, rank) if costs else {}
        by_kind: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for sent in account["sent"]:
            by_kind[sent["kind"]][0] += sent["bytes"]
            by_kind[sent["kind"]][1] += sent["messages"]
            for peer in sent["peers"]:
                to[rank, peer] += sent["bytes"] / len(sent["peers"])
                kinds[rank, peer][sent["kind"]] += sent["bytes"] / len(sent["peers"])
        for kind, (size, messages) in by_kind.items():
            formula = formulas.get(kind)
            each = size / steps if steps else None
            beside = (each, formula.bytes, formula.words) if formula else (each, None, None)
            row = (kind, messages, size, *beside)
            alike[row].append(rank)
    most: dict[str, int] = defaultdict(int)
    for kind, _, size, *_ in alike:
        most[kind] = max(most[kind], size)
    rows = [(row[0], ", ".join(map(str, ranks)), *row[1:]) for row, ranks in alike.items()]
    rows.sort(key=lambda row: (-most[row[0]], row[0]))
    head = ("kind", "ranks", "messages", "bytes", "bytes a step", "by formula", "formula")
    ranks = range(len(run.ledger))
    matrix = [[to.get((sender, receiver), 0.0) for receiver in ranks] for sender in ranks]
    shown = [[_in_kinds(kinds[sender, receiver]) for receiver in ranks] for sender in ranks]
    names = [account["name"] for account in run.ledger]
    square = table(
        "Bytes from rank (row) to rank (column), in the whole run",
        ("from", *(f"to {r}" for r in ranks)),
        ((name, *line) for name, line in zip(names, matrix, strict=True)),
    )
    return {
        "table": table("Bytes that each of these ranks sent, by kind", head, rows),
        "matrix": matrix,
        "kinds": shown,
        "ranks": names,
        "square": square,
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
    rows = [(kind, size, size / len(run.metrics)) for kind, size in totals.items()]
    caption = "Bytes that rank 0 sent (the other ranks report theirs at the end)"
    return {"table": table(caption, ("kind", "bytes", "bytes a step"), rows), "matrix": None}


def _in_kinds(sizes: dict[str, float]) -> list[list[Any]]:
    return sorted(([kind, size] for kind, size in sizes.items()), key=lambda pair: -pair[1])


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
    records = _some(records, MOST_POINTS)
    steps, loads = [r["step"] + 1 for r in records], [r[LOAD] for r in records]
    rows = _some([*zip(steps, loads, strict=True)], 60)
    return {"steps": steps, "loads": loads, "table": table("Load", ("step", LOAD_WORDS), rows)}


def ring(trace: Trace) -> Json | None:
    """Return the seconds that each rank computes in each step of the ring, in a layer."""
    by_rank = [trace.seconds_in_ring(rank) for rank in range(len(trace.ranks))]
    steps = sorted({step for seconds in by_rank for step in seconds})
    if not steps:
        return None
    rows = [[seconds.get(step, 0.0) for step in steps] for seconds in by_rank]
    names = [trace.describe(rank) for rank in range(len(by_rank))]
    head = ("rank", *(f"step {step}" for step in steps))
    caption = "Median seconds of a layer, forward and backward, by step of the ring"
    return {
        "ranks": names,
        "steps": steps,
        "rows": rows,
        "table": table(caption, head, ((n, *row) for n, row in zip(names, rows, strict=True))),
    }


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
        "logs": [[who, *lines[-200:]] for who, lines in run.logs.items() if lines],
    }


def _while_indented(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith(" "):
            return
        yield line


def _some(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most this many items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return [*items]
    if most == 1:
        return [items[len(items) // 2]]
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]
