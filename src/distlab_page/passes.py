"""The panels of a page that show a run's trace: the passes and waits of each rank, and where its time went."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from distlab.comm.recorder import COMPUTE, PART, SEND, STEP, WAIT, Event
from distlab.pipeline.actions import ACTION_KINDS, labels
from distlab.pipeline.engine import Engine, Graph
from distlab.reports.timeline import COLORS
from distlab.reports.trace import Trace
from distlab_page.records import Records, name_of
from distlab_page.tables import Json, evenly_spaced, table

MOST_BARS = 9000  # of all steps of a timeline together
MOST_STEPS = 600  # of all ranks together, that factors of efficiency are computed from
Numbers = defaultdict[str, int]  # of texts, in the order in which they are first asked for


def timeline(trace: Trace) -> Json:
    """Return the events of each step, in ms since its first one, and the plan from the measured times of passes.

    A bar is [rank, kind, name, start, length]; kinds and names are numbers of entries in lists. An arrow is [sender,
    start, receiver, end, name] of a message.
    """
    plan, steps = trace.plan(), trace.steps()
    names: Numbers = defaultdict(lambda: len(names))
    kinds: Numbers = defaultdict(lambda: len(kinds))
    bars_of_one = sum(len(_bars(trace, rank, event)) for rank, event in enumerate(steps[0]))
    kept = evenly_spaced(steps, max(1, MOST_BARS // max(1, bars_of_one)))
    lengths = [step[0].seconds for step in kept]
    shown = [_step(trace, step, plan is not None, names, kinds) for step in kept]
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
        "kinds": [{"key": kind, **_look(kind)} for kind in kinds],
        "names": [*names],
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


def _step(trace: Trace, step: Sequence[Event], from_first_pass: bool, names: Numbers, kinds: Numbers) -> dict[str, Any]:
    """Return the bars and arrows of a step, in ms since it began, or since its first pass, where a plan begins."""
    recorded = list(zip(trace.ranks, step, strict=True))
    firsts = [event for rank, own in recorded for event in rank.within(own, COMPUTE)] if from_first_pass else step
    origin = min(event.start for event in firsts)
    bars = [
        [rank, kinds[_kind(event)], names[event.name], _ms(event.start - origin), _ms(event.seconds)]
        for rank, own in enumerate(step)
        for event in _bars(trace, rank, own)
    ]
    sends, waits = (
        {e.flow: (number, e) for number, (rank, own) in enumerate(recorded) for e in rank.within(own, kind) if e.flow}
        for kind in (SEND, WAIT)
    )
    arrows = [
        [sender, _ms(send.start - origin), waits[flow][0], _ms(waits[flow][1].end - origin), names[send.name]]
        for flow, (sender, send) in sends.items()
        if flow in waits
    ]
    return {"label": step[0].name, "ms": _ms(step[0].seconds), "bars": bars, "arrows": arrows}


def _bars(trace: Trace, rank: int, step: Event) -> list[Event]:
    recorded = trace.ranks[rank]
    return [*_passes(trace, rank, step), *recorded.within(step, PART), *recorded.within(step, WAIT)]


def _passes(trace: Trace, rank: int, step: Event) -> list[Event]:
    """Return the passes of a rank in a step; the step itself if it has none."""
    return trace.ranks[rank].within(step, COMPUTE) or [step]


def _kind(event: Event) -> str:
    """Return a bar's kind: an action's letter, or "compute", "part", "wait"."""
    if event.kind == COMPUTE and event.name[0] in ACTION_KINDS:
        return event.name[0]
    return {WAIT: "wait", PART: "part", STEP: "compute"}.get(event.kind, "compute")


def _look(kind: str) -> Json:
    """Return the words and the color of a kind; the palette is safe for color-blind readers."""
    others = {
        "wait": ("waiting for other ranks", "#bbbbbb"),
        "part": ("part of a computation", COLORS["ring step"]),
        "compute": ("computing", COLORS["compute"]),
    }
    if kind in others:
        words, color = others[kind]
        return {"words": words, "color": color}
    return {"words": f"{kind}: {ACTION_KINDS[kind].in_words()}", "color": ACTION_KINDS[kind].color}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def time_spent(run: Records) -> Json | None:
    """Return what each rank did in its steps; with a trace, also three factors of efficiency."""
    rows: list[tuple[float, ...]]
    head: tuple[str, ...] = ("computing", "waiting for messages", "in collectives")
    if run.trace is not None:
        rows = [_spent(run.trace, rank) for rank in range(len(run.trace.ranks))]
        head = ("computing", "waiting", "sending", "other work")
        which = "the steps after the last repair" if run.repairs else "all steps of the trace but the first"
        if len(run.trace.steps()) == 1:
            which = "the last step of the trace"
        caption = f"Seconds in {which}, by rank"
    elif run.ledger:
        rows = [_activities(account) for account in run.ledger]
        caption = "Seconds in all steps, by rank"
    elif run.metrics and "waited_seconds" in run.metrics[0]:
        counted = "seconds", "waited_seconds", "collective_seconds"
        rows = [_activities({name: sum(record[name] for record in run.metrics) for name in counted})]
        caption = f"Seconds in all steps of {run.reporter} ({run.why_alone})"
    else:
        return None
    names = [run.trace.describe(rank) if run.trace else name_of(run, rank) for rank in range(len(rows))]
    shown = table(caption, ("rank", *head), ((name, *row) for name, row in zip(names, rows, strict=True)))
    factors = efficiency(run.trace) if run.trace else None
    return {"ranks": names, "head": head, "rows": rows, "table": shown, "factors": factors}


def _activities(record: Json) -> tuple[float, float, float]:
    """Return the seconds that a rank computed, waited for messages, and was in collectives, from a record."""
    waited, in_collectives = record["waited_seconds"], record["collective_seconds"]
    return record["seconds"] - waited, waited - in_collectives, in_collectives


def _spent(trace: Trace, rank: int) -> tuple[float, float, float, float]:
    """Return the seconds that a rank computed, waited, sent, and did anything else, in all steps."""
    computed = waited = sent = total = 0.0
    recorded = trace.ranks[rank]
    for own in (step[rank] for step in trace.steps()):
        waits, sends = recorded.within(own, WAIT), recorded.within(own, SEND)
        passes = _passes(trace, rank, own)
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
    mean over largest computing time; serialization, what dependencies leave if messages were free; transfer, the rest:
    messages, and waits for cores. Of a long run, evenly spaced steps count.
    """
    steps, ranks = evenly_spaced(trace.steps(), max(1, MOST_STEPS // len(trace.ranks))), range(len(trace.ranks))
    computing = [[_computing(trace, rank, step[rank]) for rank in ranks] for step in steps]
    by_rank = [sum(own[rank] for own in computing) for rank in ranks]
    ideal = _ideal_seconds(trace, steps) if trace.programs else sum(map(max, computing))
    taken = sum(_length(trace, step) for step in steps)
    most = max(by_rank)
    if not (most and ideal and taken):
        return None
    mean = statistics.fmean(by_rank)
    rows = (
        ("load balance", mean / most, "mean computing time of the ranks / that of the busiest"),
        ("serialization", most / ideal, "computing time of the busiest / time of the steps with free messages"),
        ("transfer", ideal / taken, "time of the steps with free messages / time that they took"),
        ("all three: efficiency", mean / taken, "mean computing time of the ranks / time that the steps took"),
    )
    return table("Factors of efficiency", ("factor", "share", "computed as"), rows, ["share"])


def _ideal_seconds(trace: Trace, steps: Sequence[Sequence[Event]]) -> float:
    """Return the time of the steps if messages were free: each pipeline plays its passes, with the times they took."""
    assert trace.programs is not None
    graph, names, total = Graph(trace.programs, trace.pipelines), labels(trace.programs), 0.0
    workers = [(trace.worker(rank), recorded) for rank, recorded in enumerate(trace.ranks)]
    worker_of = {action: worker for worker, program in enumerate(trace.programs) for action in program}

    def play(taken: dict[tuple[int, str], float]) -> float:
        return Engine(graph, lambda action: taken.get((worker_of[action], names[action]), 0.0)).makespan

    for step in steps:
        played = []
        for ranks in trace.workers():
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
    passes = _passes(trace, rank, step)
    return _seconds(passes) - _seconds(_inside(trace.ranks[rank].within(step, WAIT), passes))


def _length(trace: Trace, step: Sequence[Event]) -> float:
    """Return the seconds from the first to the last pass of a step."""
    passes = [e for rank, own in enumerate(step) for e in _passes(trace, rank, own)]
    return max(e.end for e in passes) - min(e.start for e in passes)


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
