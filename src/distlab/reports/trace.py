"""The trace of a run: the events of all ranks in one Chrome trace, and each rank's busy and waiting time.

chrome://tracing and https://ui.perfetto.dev show a `trace.json`: one process per rank, with its computation, waits and
messages, an arrow from each message's sender to its receiver, and the bytes of activations that the rank keeps.
"""

import bisect
import functools
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlab.axes.layout import EXPERTS, REPLICAS, STAGES, Layout, coordinate, describe_rank, ranks_along
from distlab.comm.recorder import COMPUTE, DEATH, MESSAGE, PART, REPAIR, RING_STEP, SEND, STEP, WAIT, Event
from distlab.pipeline.actions import ACTION_KINDS, ActionCosts, Programs, labels, stages_of
from distlab.pipeline.plan import Plan, in_a_row, simulate
from simplellm.errors import InputError

MICROSECONDS = 1e6


@dataclass
class RankTrace:
    """The records of one rank; times are in seconds from the beginning of the trace."""

    events: list[Event]  # of each kind in the order of their ends
    kept_bytes: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes of activations kept), in order

    def within(self, step: Event, kind: str) -> list[Event]:
        """Return the events of a kind that began during a step."""
        return self._by_step[step.start, kind]

    @functools.cached_property
    def _by_step(self) -> dict[tuple[float, str], list[Event]]:
        steps = sorted((event for event in self.events if event.kind == STEP), key=lambda step: step.start)
        starts = [step.start for step in steps]
        by_step: dict[tuple[float, str], list[Event]] = defaultdict(list)
        for event in self.events:
            number = bisect.bisect(starts, event.start) - 1
            if number >= 0 and event.start < steps[number].end:  # otherwise between steps, as in a checkpoint
                by_step[starts[number], event.kind].append(event)
        return by_step


@dataclass
class Trace:
    """The records of all ranks of a run."""

    ranks: list[RankTrace]
    layout: Layout
    programs: Programs | None = None  # the pipeline's schedule
    run_on: bool = False  # no rank waited at the end of a step
    pipelines: int = 1  # that follow these programs together, as with `--repair`
    alive: Sequence[int] = ()  # numbers in the layout of the ranks that have records; by default all

    def __post_init__(self) -> None:
        self.alive = tuple(self.alive or range(len(self.ranks)))

    def steps(self) -> list[list[Event]]:
        """Return, by step, each rank's recorded event; the first step, which also sets up connections, is left out.

        After repairs, the steps that count are those after the last one.
        """
        by_rank = []
        for rank in self.ranks:
            since = max((event.end for event in rank.events if event.kind == REPAIR), default=-math.inf)
            by_rank.append([event for event in rank.events if event.kind == STEP and event.start >= since])
        steps = [list(step) for step in zip(*by_rank, strict=True)]
        return steps[1:] or steps

    @property
    def oldest(self) -> RankTrace:
        """The records of the rank that has been there longest."""
        return min(self.ranks, key=lambda rank: min(event.start for event in rank.events))

    def repairs(self) -> list[Event]:
        """Return the repairs after deaths, as the oldest rank has recorded them."""
        pairs = itertools.pairwise(self.oldest.events)  # a rank records deaths, and then their repair
        return [event for before, event in pairs if (before.kind, event.kind) == (DEATH, REPAIR)]

    def workers(self) -> list[tuple[int, ...]]:
        """Return the ranks that follow the programs together, of each pipeline or of several."""
        if self.pipelines == 1:
            return ranks_along(self.layout, [STAGES])
        numbers = {rank: number for number, rank in enumerate(self.alive)}
        groups = ranks_along(self.layout, [REPLICAS, STAGES])
        return [tuple(numbers[rank] for rank in ranks if rank in numbers) for ranks in groups]

    def typical_step(self) -> list[Event]:
        """Return the step of median length."""
        ordered = sorted(self.steps(), key=lambda step: step[0].seconds)
        return ordered[len(ordered) // 2]

    def describe(self, rank: int) -> str:
        """Return the name of a rank: "rank 4 (stage 1 of replica 1)", "rank 0 (stages 0 and 3)"."""
        return self.describe_number(self.alive[rank])

    def describe_number(self, number: int) -> str:
        """Return the name of the rank with a number in the layout."""
        return describe_rank(self.layout, number, self.stages())

    def stages(self) -> list[list[int]]:
        """Return the stages of each worker of a pipeline; [] without a pipeline."""
        if self.programs is None:
            return []
        ranks = range(len(self.ranks))
        held = {coordinate(self.layout, self.alive[r], STAGES): self.programs[self.worker(r)] for r in ranks}
        return [stages_of(held[worker]) for worker in sorted(held)]

    def worker(self, rank: int) -> int:
        """Return the number of a rank in its pipeline, or among those that follow the programs together."""
        return next(ranks.index(rank) for ranks in self.workers() if rank in ranks)

    def costs(self) -> ActionCosts:
        """Return the mean time of each kind of action on each stage."""
        assert self.programs is not None
        names, seconds = labels(self.programs), defaultdict[tuple[str, int], list[float]](list)
        for rank, recorded in enumerate(self.ranks):
            keys = {names[action]: (action.letter, action.stage) for action in self.programs[self.worker(rank)]}
            for step in self.steps():
                for event in recorded.within(step[rank], COMPUTE):
                    seconds[keys[event.name]].append(event.seconds)
        return ActionCosts(measured={key: statistics.fmean(values) for key, values in seconds.items()})

    def plan(self, steps: int = 1) -> Plan | None:
        """Return the schedule, simulated with the measured costs and free messages; None without a pipeline.

        With several `steps`, no worker waits at the end of a step.
        """
        if self.programs is None:
            return None
        return simulate(in_a_row(self.programs, steps), self.costs(), holders=self.pipelines)

    def busy(self, rank: int, steps: Sequence[Sequence[Event]] | None = None) -> tuple[float, float]:
        """Return the fractions of time that a rank computes, and that it waits for others, in `steps` (default: all).

        In a pipeline, a step lasts from the first to the last pass of the ranks that follow the programs together.
        """
        computed = waited = total = 0.0
        until = -math.inf
        replica = [rank] if self.programs is None else [*range(len(self.ranks))]
        if self.programs is not None and self.pipelines == 1:
            others = [axis for axis in self.layout if axis not in (REPLICAS, EXPERTS)]
            replica = next([*ranks] for ranks in ranks_along(self.layout, others) if rank in ranks)
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

    def seconds_in_ring(self, rank: int) -> dict[int, float]:
        """Return, by step of the ring, the median seconds of a rank's computation in a layer, forward and backward."""
        taken = defaultdict[str, list[float]](list)
        for step in self.steps():
            for event in self.ranks[rank].within(step[rank], PART):
                if event.name.startswith(RING_STEP):
                    taken[event.name].append(event.seconds)
        seconds: dict[int, float] = defaultdict(float)
        for name, times in taken.items():
            seconds[int(name.removeprefix(RING_STEP).partition(",")[0])] += statistics.median(times)
        return seconds

    def report(self) -> Iterator[str]:
        """Yield a line for each rank: its busy and waiting time, and the bubble in theory."""
        plan = self.plan(len(self.steps()) if self.run_on else 1)
        for rank in range(len(self.ranks)):
            busy, waiting = self.busy(rank)
            theory = f", bubble in theory {plan.bubble[self.worker(rank)]:.0%}" if plan else ""
            yield f"{self.describe(rank)}: busy {busy:.0%}, waiting {waiting:.0%}{theory}"


def merge(recorded: Sequence[dict[str, Any]]) -> list[RankTrace]:
    """Return the ranks of a trace from their records, as `Recorder.as_json` returns them."""
    origin = min((event[2] for rank in recorded for event in rank["events"]), default=0.0)
    ranks = []
    for rank in recorded:
        events = [
            Event(kind, name, start - origin, end - origin, flow) for kind, name, start, end, flow in rank["events"]
        ]
        ranks.append(RankTrace(events, [(seconds - origin, kept) for seconds, kept in rank["kept_bytes"]]))
    return ranks


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
                message = {"args": {"message": event.flow}} if event.flow else {}
                events.append({**base, "ph": "X", "ts": start, "dur": end - start, **message})
        for seconds, kept in recorded.kept_bytes:
            counter = {"name": "kept activations", "ts": seconds * MICROSECONDS, "args": {"bytes": kept}}
            events.append({"ph": "C", **place, **counter})
    events += _arrows(trace)
    programs: Any = trace.programs and [[(a.letter, a.stage, a.micro_batch) for a in line] for line in trace.programs]
    about = {"layout": trace.layout, "ranks": len(trace.ranks), "programs": programs, "run_on": trace.run_on}
    about |= {"pipelines": trace.pipelines, "alive": [*trace.alive]}
    path.write_text(json.dumps({"traceEvents": events, "otherData": about}) + "\n")


def _arrows(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the two ends of an arrow for each message that has both: in its `SEND`, and in the wait that it ended."""
    ends = {}
    for rank, recorded in enumerate(trace.ranks):
        for event in recorded.events:
            if event.flow:
                ends[event.flow, event.kind == SEND] = rank, event
    for (flow, is_sent), (receiver, wait) in ends.items():
        if not is_sent and (flow, True) in ends:
            sender, send = ends[flow, True]
            arrow = {"name": "message", "cat": MESSAGE, "id": flow, "tid": 0}
            yield {**arrow, "ph": "s", "pid": sender, "ts": send.start * MICROSECONDS}
            # Inside of the wait, in its last microsecond: viewers attach it to the interval that contains its time.
            arrived = max(wait.start, wait.end - 1 / MICROSECONDS)
            yield {**arrow, "ph": "f", "bp": "e", "pid": receiver, "ts": arrived * MICROSECONDS}


def read_chrome(path: Path) -> Trace:
    """Read a file of `write_chrome`; raises `InputError` if it is missing or is not the trace of a run.

    After a repair in the last step, the trace has no `steps`.
    """
    try:
        content = json.loads(path.read_text())
        about = content["otherData"]
        ranks = [RankTrace([]) for _ in range(about["ranks"])]
        for event in content["traceEvents"]:
            rank = ranks[event["pid"]]
            if event["ph"] == "X":
                start = event["ts"] / MICROSECONDS
                flow = event.get("args", {}).get("message", "")
                rank.events.append(Event(event["cat"], event["name"], start, start + event["dur"] / MICROSECONDS, flow))
            elif event["ph"] == "C":
                rank.kept_bytes.append((event["ts"] / MICROSECONDS, event["args"]["bytes"]))
        lines = about["programs"]
        programs = lines and [[ACTION_KINDS[letter](*place) for letter, *place in line] for line in lines]
        trace = Trace(
            ranks, about["layout"], programs, about["run_on"], about.get("pipelines", 1), about.get("alive", ())
        )
        if not all(any(event.kind == STEP for event in rank.events) for rank in ranks):
            raise ValueError("a rank without steps")
        trace.steps()
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path}: this is not the trace of a run; --trace records one") from error
    return trace
