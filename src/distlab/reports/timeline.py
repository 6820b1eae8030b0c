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
    """A time span in a row."""

    row: int  # from 0, at the top
    start: float  # on the panel's axis
    end: float
    label: str  # of an action, which is written into the bar and gives its colour, or one of `COLORS`
    low: float = 0.08  # the bar's edges, as fractions of the row's height
    high: float = 0.92


@dataclass(frozen=True)
class Panel:
    """One picture of several rows."""

    title: str
    rows: list[str]
    bars: list[Bar]
    unit: str


def planned_panel(title: str, plan: Plan, unit: str = "ticks") -> Panel:
    bars = [Bar(row, s.start, s.end, plan.labels[s.action]) for row, spans in enumerate(plan.spans) for s in spans]
    return Panel(title, plan.rows, bars, unit)


def measured_panel(title: str, trace: Trace) -> Panel:
    """The typical step of a run; for a pipeline, with the plan for the measured costs above each rank's bars."""
    plan, by_rank, bars = trace.plan(), [], []
    for step, rank in zip(trace.typical_step(), trace.ranks, strict=True):
        whole = [Event(COMPUTE, "compute", step.start, step.end)] if plan is None else []
        by_rank.append([*whole, *rank.within(step, WAIT), *rank.within(step, COMPUTE)])
    origin = min(event.start for events in by_rank for event in events if event.kind == COMPUTE)
    low, high = (0.08, 0.92) if plan is None else (0.4, 0.95)
    for row, events in enumerate(by_rank):
        for event in events:
            label = "wait" if event.kind == WAIT else event.name
            bars.append(Bar(row, (event.start - origin) * 1e3, (event.end - origin) * 1e3, label, low, high))
        if plan is not None:
            spans = plan.spans[trace.place(row).stage]
            bars += [Bar(row, s.start * 1e3, s.end * 1e3, plan.labels[s.action], 0.1, 0.34) for s in spans]
    rows = [trace.describe(rank).replace(" (", "\n(") for rank in range(len(trace.ranks))]
    return Panel(title, rows, bars, "ms")


def draw(png: Path, panels: Sequence[Panel]) -> None:
    """Write a figure with one panel below the other; raises what `save` does."""
    heights = [0.5 * len(panel.rows) + 0.9 for panel in panels]
    options: dict[str, Any] = {"layout": "constrained", "squeeze": False, "height_ratios": heights}
    figure, grid = pyplot().subplots(len(panels), figsize=(10, sum(heights)), **options)
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
    start, rows = min(0.0, *(bar.start for bar in panel.bars)), len(panel.rows)
    axes.set_title(panel.title, size=10)
    axes.set(xlabel=panel.unit, xlim=(start, end * 1.01), ylim=(rows, 0))
    axes.set_yticks([row + 0.5 for row in range(rows)], panel.rows)
    axes.tick_params(axis="y", length=0)


def action_color(label: str) -> tuple[float, ...]:
    """The color of the kind of action, lighter on each further stage of a worker."""
    from matplotlib.colors import to_rgb

    name = label.rstrip("'")
    red_green_blue = to_rgb(KINDS[name.rstrip("0123456789")].color)
    return tuple(1 - (1 - part) * 0.55 ** (len(label) - len(name)) for part in red_green_blue)


def save(figure: Any, png: Path) -> None:
    """Write a figure to a file; raises `InputError` if that fails, as with an unknown suffix."""
    try:
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=100)
        pyplot().close(figure)
    except (OSError, ValueError) as error:
        raise InputError(f"{png}: cannot be drawn ({error}); give the path of a .png file") from error


def pyplot() -> Any:
    """matplotlib's pyplot, without a display and in the project's style."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
    return plt
