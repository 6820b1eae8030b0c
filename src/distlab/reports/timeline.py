"""Draws who does what when: planned schedules, measured runs, and one laid over the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlab.comm.recorder import COMPUTE, WAIT, Event
from distlab.pipeline.actions import KINDS
from distlab.pipeline.plan import Plan
from distlab.reports.trace import Trace
from simplellm.errors import InputError

COLORS = {"wait": "#ececec", "compute": "#8db4dd"}  # beside those of the actions


@dataclass(frozen=True)
class Bar:
    """A stretch of time in a row."""

    row: int  # from 0, at the top
    start: float  # on the panel's axis
    end: float
    label: str  # of an action, which is written into the bar and gives its colour, or one of `COLORS`
    low: float = 0.08  # part of the row's height that the bar takes
    high: float = 0.92


@dataclass(frozen=True)
class Panel:
    """One picture of several rows."""

    title: str
    rows: list[str]
    bars: list[Bar]
    unit: str


def planned_panel(title: str, plan: Plan, unit: str = "ticks") -> Panel:
    """A plan alone."""
    bars = [Bar(row, s.start, s.end, plan.labels[s.action]) for row, spans in enumerate(plan.spans) for s in spans]
    return Panel(title, plan.rows, bars, unit)


def measured_panel(title: str, trace: Trace) -> Panel:
    """The typical step of a run; for a pipeline, with the plan for the measured costs above each rank's bars."""
    step, plan = trace.typical_step(), trace.plan()
    by_rank = [[*rank.within(step[r], WAIT), *rank.within(step[r], COMPUTE)] for r, rank in enumerate(trace.ranks)]
    if plan is None:
        by_rank = [
            [Event(COMPUTE, "compute", own.start, own.end), *events] for own, events in zip(step, by_rank, strict=True)
        ]
    origin = min(event.start for events in by_rank for event in events if event.kind == COMPUTE)
    low, high = (0.08, 0.92) if plan is None else (0.4, 0.95)
    bars = []
    for row, events in enumerate(by_rank):
        for event in events:
            label = "wait" if event.kind == WAIT else event.name
            bars.append(Bar(row, (event.start - origin) * 1e3, (event.end - origin) * 1e3, label, low, high))
    if plan is not None:
        for row in range(len(trace.ranks)):
            for span in plan.spans[trace.place(row).stage]:
                bars.append(Bar(row, span.start * 1e3, span.end * 1e3, plan.labels[span.action], 0.1, 0.34))
    rows = [trace.describe(rank).replace(" (", "\n(") for rank in range(len(trace.ranks))]
    return Panel(title, rows, bars, "ms")


def draw(png: Path, panels: Sequence[Panel]) -> None:
    """Write a figure with one panel below the other.

    Raises:
        InputError: the file cannot be written, or its name does not tell a format that there is.
    """
    plt = pyplot()
    heights = [0.5 * len(panel.rows) + 0.9 for panel in panels]
    figure, grid = plt.subplots(
        len(panels), figsize=(10, sum(heights)), layout="constrained", squeeze=False, height_ratios=heights
    )
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        _draw_panel(axes, panel)
    save(figure, png)


def _draw_panel(axes: Any, panel: Panel) -> None:
    end = max(bar.end for bar in panel.bars)
    for bar in panel.bars:
        color = COLORS.get(bar.label) or action_color(bar.label)
        width, height = bar.end - bar.start, bar.high - bar.low
        edge = "none" if bar.label == "wait" else "white"
        axes.barh(bar.row + bar.low, width, height, bar.start, align="edge", color=color, edgecolor=edge, linewidth=0.6)
        if bar.label not in COLORS and width > 0.013 * end * len(bar.label):
            middle = (bar.start + bar.end) / 2, bar.row + (bar.low + bar.high) / 2
            axes.text(*middle, bar.label, size=8 if height > 0.3 else 6, ha="center", va="center")
    axes.set(title=panel.title, xlabel=panel.unit, xlim=(min(0.0, *(bar.start for bar in panel.bars)), end * 1.01))
    axes.set_yticks([row + 0.5 for row in range(len(panel.rows))], panel.rows)
    axes.set_ylim(len(panel.rows), 0)
    axes.title.set_size(10)
    axes.tick_params(axis="y", length=0)


def action_color(label: str) -> tuple[float, ...]:
    """That of the kind of action, lighter on each further stage of a worker."""
    from matplotlib.colors import to_rgb

    name = label.rstrip("'")
    red_green_blue = to_rgb(KINDS[name.rstrip("0123456789")].color)
    return tuple(1 - (1 - part) * 0.55 ** (len(label) - len(name)) for part in red_green_blue)


def save(figure: Any, png: Path) -> None:
    """Write a figure to a file.

    Raises:
        InputError: the file cannot be written, or its name does not tell a format that there is.
    """
    try:
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=100)
        pyplot().close(figure)
    except (OSError, ValueError) as error:
        raise InputError(f"{png}: cannot be drawn ({error}); give the path of a .png file") from error


def pyplot() -> Any:
    """matplotlib's pyplot, without a screen and in the project's style."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
    return plt
