"""Draws timelines: planned schedules, measured runs, and both together."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlab.axes.layout import REPLICAS, coordinate, layout_size
from distlab.comm.recorder import COMPUTE, DEATH, PART, REPAIR, STEP, WAIT, Event
from distlab.pipeline.actions import ACTION_KINDS, stages_of
from distlab.pipeline.plan import Plan
from distlab.reports import style
from distlab.reports.trace import Trace
from simplellm.errors import require

COLORS = {  # in addition to the colors of actions
    "compute": style.SKY,
    "ring step": style.BLUE,
    "wait": style.PALE,
    "repair": style.VERMILLION,
}
ROW_INCHES, PLANNED_ROW_INCHES = 0.6, 0.17
EDGE: dict[str, Any] = {"edgecolor": style.BACKGROUND, "linewidth": 0.5}
WHOLE, PLANNED, MEASURED = (0.08, 0.92), (0.05, 0.35), (0.39, 0.95)  # edges of bars, as fractions of the row's height


@dataclass(frozen=True)
class Bar:
    """A time span in a row."""

    row: int  # from 0, at the top
    start: float  # on the panel's axis
    end: float
    label: str  # an action's label, which is written into the bar and determines its color, or one of `COLORS`
    edges: tuple[float, float] = WHOLE


@dataclass(frozen=True)
class Panel:
    """One set of axes with several rows."""

    title: str
    rows: list[str]
    bars: list[Bar]
    unit: str
    deaths: list[tuple[int, float]] = field(default_factory=list)  # rows, and times on the panel's axis


def planned_panel(title: str, plan: Plan) -> Panel:
    bars = [Bar(row, s.start, s.end, plan.labels[s.action]) for row, spans in enumerate(plan.spans) for s in spans]
    return Panel(title, plan.rows, bars, "ticks")


def measured_panel(title: str, trace: Trace) -> Panel:
    """Return a run's typical step; for a pipeline, with the plan from the measured costs above each rank's bars."""
    plan, by_rank, bars = trace.plan(), [], []
    for step, rank in zip(trace.typical_step(), trace.ranks, strict=True):
        whole = [Event(COMPUTE, "compute", step.start, step.end)] if plan is None else []
        by_rank.append([*whole, *rank.within(step, WAIT), *rank.within(step, COMPUTE), *rank.within(step, PART)])
    origin = min(event.start for events in by_rank for event in events if event.kind == COMPUTE)
    edges = WHOLE if plan is None else MEASURED
    for row, events in enumerate(by_rank):
        for event in events:
            label = "wait" if event.kind == WAIT else event.name.partition(",")[0]  # not ", backward"
            label = _with_star(label, trace, row) if plan is not None and event.kind == COMPUTE else label
            bars.append(Bar(row, (event.start - origin) * 1e3, (event.end - origin) * 1e3, label, edges))
        if plan is not None:
            for span in plan.spans[trace.worker(row)]:
                label = _with_star(plan.labels[span.action], trace, row)
                bars.append(Bar(row, span.start * 1e3, span.end * 1e3, label, PLANNED))
    rows = [trace.describe(rank).replace(" (", "\n(") for rank in range(len(trace.ranks))]
    return Panel(title, rows, bars, "ms")


def repair_panel(trace: Trace, repair: Event) -> Panel:
    """Return a repair, from the start of the interrupted step to the end of the repeated one, in milliseconds.

    It has a row for each rank of the layout; the records of dead ones are lost. A star marks work of a dead rank.
    """
    steps = [event for event in trace.oldest.events if event.kind == STEP]
    origin = max((step.start for step in steps if step.start < repair.start), default=repair.start)
    until = min((step.end for step in steps if step.start >= repair.end), default=repair.end)
    bars = list[Bar]()
    for rank, recorded in enumerate(trace.ranks):
        shown = [event for event in recorded.events if event.end > origin and event.start < until]
        computing = STEP if trace.programs is None else COMPUTE
        for kind, label in ((computing, "compute"), (WAIT, "wait"), (REPAIR, "repair")):
            for event in shown:
                if event.kind == kind:
                    own = _with_star(event.name, trace, rank) if kind == COMPUTE else label
                    start, end = (1e3 * (min(until, max(origin, at)) - origin) for at in (event.start, event.end))
                    bars.append(Bar(trace.alive[rank], start, end, own))
    found = [(re.match(r"rank (\d+)", e.name), e.start) for e in trace.oldest.events if e.kind == DEATH]
    deaths = [(int(match[1]), 1e3 * (at - origin)) for match, at in found if match and origin < at < until]
    rows = [trace.describe_number(number).replace(" (", "\n(") for number in range(layout_size(trace.layout))]
    return Panel("A repair: ranks that died (x), and the step that was taken again", rows, bars, "ms", deaths)


def _with_star(label: str, trace: Trace, rank: int) -> str:
    """Return a pass's label, with a star if its micro-batch is another pipeline's."""
    if trace.pipelines == 1:
        return label
    assert trace.programs is not None
    each = (1 + max(action.micro_batch for line in trace.programs for action in line)) // trace.pipelines
    number = int(re.sub(r"\D", "", label))
    own = coordinate(trace.layout, trace.alive[rank], REPLICAS)
    return label + "*" * (number // each != own)


def draw(png: Path, panels: Sequence[Panel]) -> None:
    """Write a figure with the panels one below another; raises the same errors as `save`."""
    heights = [ROW_INCHES * len(panel.rows) + 0.85 for panel in panels]
    options: dict[str, Any] = {"squeeze": False, "height_ratios": heights}
    figure, grid = style.subplots(sum(heights) + 0.3, len(panels), **options)
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        _draw_panel(axes, panel)
    drawn = {_kind(bar.label) for panel in panels for bar in panel.bars}
    kinds = [kind for kind in (*ACTION_KINDS, *COLORS) if kind in drawn]
    has_stars = any(bar.label.endswith("*") for panel in panels for bar in panel.bars)
    stars = {"*: work of a dead rank": style.swatch(action_color("F0*"))} if has_stars else {}
    style.legend(figure, _explain(kinds) | stars)
    style.save(figure, png)


def draw_schedules(png: Path, traces: Sequence[tuple[str, Trace]]) -> None:
    """Write a figure of a measured step of several schedules, each under its plan, all with one axis of time.

    A bar of the plan has the number of its micro-batch. Raises the same errors as `save`.
    """
    measured = 0.55  # height of a measured row, relative to a planned one
    heights = [sum(PLANNED_ROW_INCHES * (1 + measured) for _ in trace.ranks) + 0.4 for _, trace in traces]
    options: dict[str, Any] = {"squeeze": False, "height_ratios": heights, "sharex": True}
    figure, grid = style.subplots(sum(heights) + 0.8, len(traces), **options)
    kinds: set[str] = set()
    for axes, (name, trace) in zip(grid[:, 0], traces, strict=True):
        plan, step, count = trace.plan(), trace.typical_step(), len(trace.ranks)
        require(plan is not None, f"{name}: the trace has no schedule")
        assert plan is not None
        passes = [rank.within(own, COMPUTE) for rank, own in zip(trace.ranks, step, strict=True)]
        origin = min(event.start for own in passes for event in own)
        below = count + 0.25  # where the measured rows begin
        for row in range(count):
            for span in plan.spans[trace.worker(row)]:
                label, width = plan.labels[span.action], (span.end - span.start) * 1e3
                axes.barh(row + 0.5, width, 0.96, span.start * 1e3, color=action_color(label), **EDGE)
                middle, number = span.start * 1e3 + width / 2, span.action.micro_batch
                axes.text(middle, row + 0.5, number, size=style.SMALL, ha="center", va="center_baseline")
                kinds.add(_kind(label))
            for event in passes[row]:
                start, width = (event.start - origin) * 1e3, event.seconds * 1e3
                middle = below + (row + 0.5) * measured
                axes.barh(middle, width, 0.94 * measured, start, color=action_color(event.name), **EDGE)
        idle = [1 - trace.busy(rank, [step])[0] for rank in range(count)]
        shares = f"idle {sum(plan.bubble) / len(plan.bubble):.1%} in the plan, {sum(idle) / count:.1%} measured"
        axes.set_title(f"{name}: {shares}", loc="left")
        axes.set(ylim=(below + count * measured, 0))
        axes.set_yticks([count / 2, below + count * measured / 2], ["plan", "measured"])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
    has_several = any(len(stages_of(program)) > 1 for _, trace in traces for program in trace.programs or ())
    grid[-1, 0].set(xlabel="ms" + "; the second stage of a worker is lighter" * has_several, xlim=0)
    style.legend(figure, _explain([kind for kind in ACTION_KINDS if kind in kinds]))
    style.save(figure, png)


def _draw_panel(axes: Any, panel: Panel) -> None:
    start, end = min(0.0, *(bar.start for bar in panel.bars)), max(bar.end for bar in panel.bars)
    # By height, the label of the y axis; a dead rank has no bars.
    names = {row + sum(WHOLE) / 2: panel.rows[row] for row, _ in panel.deaths}
    for bar in panel.bars:
        (low, high), width = bar.edges, bar.end - bar.start
        middle = bar.row + (low + high) / 2
        names[middle] = "plan" if bar.edges == PLANNED else panel.rows[bar.row]
        edge = "none" if bar.label == "wait" else style.BACKGROUND
        axes.barh(middle, width, high - low, bar.start, color=_color(bar.label), edgecolor=edge)
        if bar.label not in COLORS and width > 0.014 * (end - start) * len(bar.label):
            place = {"ha": "center", "va": "center_baseline", "size": style.SMALL}
            is_dark = bar.label.endswith("*") or bar.label == "ring step 0"
            color = style.BACKGROUND if is_dark else style.INK
            axes.text(bar.start + width / 2, middle, bar.label, color=color, **place)
    for row, at in panel.deaths:
        axes.plot(at, row + 0.5, "x", color=COLORS["repair"], markersize=9, markeredgewidth=2.5, clip_on=False)
    axes.set(title=panel.title, xlabel=panel.unit, xlim=(start, end), ylim=(len(panel.rows), 0))
    axes.set_yticks([*names], names.values())
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def action_color(label: str) -> tuple[float, ...]:
    """Return the color of an action's kind, lighter for each further stage of a worker; darker with a star."""
    plain = label.rstrip("*")
    further_stages = len(plain) - len(plain.rstrip("'"))
    color = style.lighter(ACTION_KINDS[_kind(label)].color, 0.55**further_stages)
    return tuple(0.6 * part for part in color) if plain != label else color


def _color(label: str) -> Any:
    color = COLORS.get(_kind(label))
    if color is None:
        return action_color(label)
    return style.lighter(color, 0.6 ** int(label.removeprefix(_kind(label)) or 0))  # of a ring's later steps


def _kind(label: str) -> str:
    """Return the letter of an action's kind, or the label of a bar that is not an action."""
    return label.rstrip("*' 0123456789")


def _explain(kinds: Sequence[str]) -> dict[str, Any]:
    """Return the legend's entries: "I, i: backward input" and its color, for all kinds of this color."""
    alike: dict[Any, list[str]] = {}
    for kind in kinds:
        alike.setdefault(_color(kind), []).append(kind)
    meanings = {kind: f": {ACTION_KINDS[kind].in_words()}" if kind in ACTION_KINDS else "" for kind in kinds}
    return {f"{', '.join(own)}{meanings[own[0]]}": style.swatch(color) for color, own in alike.items()}
