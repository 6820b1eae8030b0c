"""The trace of a run: the events of all ranks in one Chrome trace, and each rank's busy and waiting time.

chrome://tracing and https://ui.perfetto.dev show a `trace.json`: one process per rank, with its computation, waits and
messages, and the bytes of activations that it keeps.
"""

import bisect
import functools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlab.comm.grid import Grid
from distlab.comm.layout import Neighbors
from distlab.comm.recorder import COMPUTE, MESSAGE, STEP, WAIT, Event
from distlab.pipeline.actions import KINDS, ActionCosts, Program, Programs, labels, stages_of
from distlab.pipeline.plan import Plan, in_a_row, simulate
from simplellm.errors import InputError

MICROSECONDS = 1e6


@dataclass
class RankTrace:
    """The records of one rank; times are in seconds from the beginning of the trace."""

    events: list[Event]  # in the order in which they ended
    kept_bytes: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes of activations kept), in order

    def within(self, step: Event, kind: str) -> list[Event]:
        """The events of a kind that began during a step."""
        return self._by_step[step.start, kind]

    @functools.cached_property
    def _by_step(self) -> dict[tuple[float, str], list[Event]]:
        starts = [-math.inf, *sorted(event.start for event in self.events if event.kind == STEP)]
        by_step: dict[tuple[float, str], list[Event]] = defaultdict(list)
        for event in self.events:
            by_step[starts[bisect.bisect(starts, event.start) - 1], event.kind].append(event)
        return by_step


@dataclass
class Trace:
    """The records of all ranks of a run."""

    ranks: list[RankTrace]
    dp: int  # replicas
    pp: int  # workers of each replica's pipeline
    programs: Programs | None = None  # the pipeline's schedule
    tp: int = 1  # ranks of each worker
    run_on: bool = False  # no rank waited at the end of a step
    neighbors: Neighbors = "stages"  # what neighboring ranks hold

    def steps(self) -> list[list[Event]]:
        """By step, the event that each rank recorded; without the first step, which also sets up connections."""
        by_rank = [[event for event in rank.events if event.kind == STEP] for rank in self.ranks]
        steps = [list(step) for step in zip(*by_rank, strict=True)]
        return steps[1:] or steps

    def typical_step(self) -> list[Event]:
        """The step of median length."""
        ordered = sorted(self.steps(), key=lambda step: step[0].seconds)
        return ordered[len(ordered) // 2]

    def describe(self, rank: int) -> str:
        """The name of a rank: "rank 4 (stage 1 of replica 1)", "rank 0 (stages 0 and 3)"."""
        return self.place(rank).describe(rank)

    def place(self, rank: int) -> Grid:
        held = [stages_of(program) for program in self.programs or ()]
        return Grid(rank, self.dp, self.pp, self.tp, held, self.neighbors)

    def costs(self) -> ActionCosts:
        """The mean time of each kind of action on each stage."""
        assert self.programs is not None
        names, seconds = labels(self.programs), defaultdict[tuple[str, int], list[float]](list)
        for rank, recorded in enumerate(self.ranks):
            keys = {names[action]: (action.letter, action.stage) for action in self.programs[self.place(rank).stage]}
            for step in self.steps():
                for event in recorded.within(step[rank], COMPUTE):
                    seconds[keys[event.name]].append(event.seconds)
        return ActionCosts(measured={key: statistics.fmean(values) for key, values in seconds.items()})

    def plan(self, steps: int = 1) -> Plan | None:
        """The schedule, simulated with the measured costs and free messages; None without a pipeline.

        With several `steps`, no worker waits at the end of a step.
        """
        return simulate(in_a_row(self.programs, steps), self.costs()) if self.programs is not None else None

    def busy(self, rank: int, steps: Sequence[Sequence[Event]] | None = None) -> tuple[float, float]:
        """The fractions of time in which a rank computes, and in which it waits for others, in `steps` (default: all).

        In a pipeline, a step lasts from the first to the last pass of the rank's replica.
        """
        computed = waited = total = 0.0
        until = -math.inf
        ranks = [rank] if self.programs is None else range(len(self.ranks))
        replica = [r for r in ranks if self.place(r).replica == self.place(rank).replica]
        for step in steps or self.steps():
            passes = {r: self.ranks[r].within(step[r], COMPUTE) or [step[r]] for r in replica}
            start = min(event.start for own in passes.values() for event in own)
            end = max(event.end for own in passes.values() for event in own)
            waits = self.ranks[rank].within(step[rank], WAIT)
            computed += sum(event.seconds for event in passes[rank])
            # Ranks that share a stage also wait for each other during a pass.
            computed -= sum(w.seconds for w in waits if any(p.start <= w.start < p.end for p in passes[rank]))
            waited += sum(max(0.0, min(event.end, end) - max(event.start, start)) for event in waits)
            total += max(0.0, end - max(start, until))  # with `--run-on`, steps of different ranks overlap
            until = max(until, end)
        return computed / total, waited / total

    def report(self) -> Iterator[str]:
        """A line for each rank: its busy and waiting time, and the bubble in theory."""
        plan = self.plan(len(self.steps()) if self.run_on else 1)
        for rank in range(len(self.ranks)):
            busy, waiting = self.busy(rank)
            theory = f", bubble in theory {plan.bubble[self.place(rank).stage]:.0%}" if plan else ""
            yield f"{self.describe(rank)}: busy {busy:.0%}, waiting {waiting:.0%}{theory}"


def merge(
    recorded: Sequence[dict[str, Any]],
    dp: int,
    pp: int,
    programs: Programs | None,
    tp: int = 1,
    run_on: bool = False,
    neighbors: Neighbors = "stages",
) -> Trace:
    """A trace from the records of all ranks, as `Recorder.as_json` returns them."""
    origin = min((event[2] for rank in recorded for event in rank["events"]), default=0.0)
    ranks = []
    for rank in recorded:
        events = [Event(kind, name, start - origin, end - origin) for kind, name, start, end in rank["events"]]
        ranks.append(RankTrace(events, [(seconds - origin, kept) for seconds, kept in rank["kept_bytes"]]))
    return Trace(ranks, dp, pp, programs, tp, run_on, neighbors)


def write_chrome(trace: Trace, path: Path) -> None:
    """Write a trace in Chrome's format."""
    events: list[dict[str, Any]] = []
    for rank, recorded in enumerate(trace.ranks):
        place = {"pid": rank, "tid": 0}
        events.append({"ph": "M", "name": "process_name", **place, "args": {"name": trace.describe(rank)}})
        for number, event in enumerate(recorded.events):
            base = {"name": event.name, "cat": event.kind, **place}
            start, end = event.start * MICROSECONDS, event.end * MICROSECONDS
            if event.kind == MESSAGE:  # messages overlap each other
                events.append({**base, "ph": "b", "id2": {"local": number}, "ts": start})
                events.append({**base, "ph": "e", "id2": {"local": number}, "ts": end})
            else:
                events.append({**base, "ph": "X", "ts": start, "dur": end - start})
        for seconds, kept in recorded.kept_bytes:
            counter = {"name": "kept activations", "ts": seconds * MICROSECONDS, "args": {"bytes": kept}}
            events.append({"ph": "C", **place, **counter})
    programs: Any = trace.programs and [[(a.letter, a.stage, a.micro_batch) for a in line] for line in trace.programs]
    about = {"dp": trace.dp, "pp": trace.pp, "tp": trace.tp, "ranks": len(trace.ranks), "programs": programs}
    about |= {"run_on": trace.run_on, "neighbors": trace.neighbors}
    path.write_text(json.dumps({"traceEvents": events, "otherData": about}) + "\n")


def read_chrome(path: Path) -> Trace:
    """Read a file of `write_chrome`; raises `InputError` if it is missing or is not the trace of a run."""
    try:
        content = json.loads(path.read_text())
        about = content["otherData"]
        ranks = [RankTrace([]) for _ in range(about["ranks"])]
        for event in content["traceEvents"]:
            rank = ranks[event["pid"]]
            if event["ph"] == "X":
                start = event["ts"] / MICROSECONDS
                rank.events.append(Event(event["cat"], event["name"], start, start + event["dur"] / MICROSECONDS))
            elif event["ph"] == "C":
                rank.kept_bytes.append((event["ts"] / MICROSECONDS, event["args"]["bytes"]))
        lines = about["programs"]
        programs = lines and [_program(line, worker) for worker, line in enumerate(lines)]
        since = [about.get(name, usual) for name, usual in (("tp", 1), ("run_on", False), ("neighbors", "stages"))]
        trace = Trace(ranks, about["dp"], about["pp"], programs, *since)  # older traces do not have these
        trace.typical_step()
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path}: this is not the trace of a run; --trace records one") from error
    return trace


def _program(line: list[Any], worker: int) -> Program:
    """A worker's actions; older traces only name them ("F2"), and have one stage per worker."""
    places = [(name[0], worker, name[1:]) if isinstance(name, str) else name for name in line]
    return [KINDS[letter](stage, int(micro_batch)) for letter, stage, micro_batch in places]
