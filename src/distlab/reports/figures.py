"""Figures drawn from runs, schedules and layouts; `python -m distlab.figures` is the command."""

import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from distlab.collectives.algorithms import ALL_REDUCES, allreduce_ring, broadcast_naive, broadcast_ring, broadcast_tree
from distlab.collectives.simulation import Link, SimulatedWorld
from distlab.comm.grid import Grid
from distlab.reports.memory import KINDS, read_largest
from distlab.reports.timeline import COLORS, draw, measured_panel, pyplot, save
from distlab.reports.trace import Trace, read_chrome
from simplellm.errors import InputError, require

Png = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="file to write")]
HELP = "what to call each run, and its folder"
NAMED_RUNS = partial(tyro.conf.arg, metavar="[NAME=]RUN [[NAME=]RUN ...]")
NamedRuns = Annotated[tyro.conf.Positional[list[str]], NAMED_RUNS(help=HELP)]
TRACED_HELP = f"{HELP} or its trace file; they were started with --trace"
NamedTraces = Annotated[tyro.conf.Positional[list[str]], NAMED_RUNS(help=TRACED_HELP)]
Against = Literal["steps", "tokens", "seconds"]
PALETTE = ["#c9d6e8", "#2f6db3", "#e08a1e", "#b23a48", "#4c9a6a", "#7a5ba6"]


def losses(
    png: Png, runs: NamedRuns, /, title: str = "Loss of the global batch", smooth: int = 15, against: Against = "steps"
) -> None:
    """The training loss of several runs and, as dots, their validation loss.

    Later runs are thinner, so that curves which coincide are all seen.

    Args:
        title: line above the figure.
        smooth: steps of the moving average.
        against: what the curves run over; seconds are those of the steps, tokens those of all ranks.
    """
    require(smooth >= 1, f"--smooth {smooth}: the mean is of at least 1 step")
    figure, axes = pyplot().subplots(figsize=(8, 4.2), layout="constrained")
    for index, (name, run) in enumerate(_named(runs)):
        color = PALETTE[index % len(PALETTE)]
        records = read_metrics(run)
        where = places(records, against, run)
        means = moving_average([record["loss"] for record in records], smooth)
        style = {"linewidth": max(1.4, 6 - 3 * index), "linestyle": "--" if index == 2 else "-"}
        axes.plot(where, means, label=name, color=color, **style)
        validated = [(x, r["validation_loss"]) for x, r in zip(where, records, strict=True) if "validation_loss" in r]
        if validated:
            dots = {"label": f"{name}: validation", "color": color, "mec": "black", "mew": 0.5, "ms": 4}
            axes.plot(*zip(*validated, strict=True), "o", **dots)
    axes.set(title=title, xlabel=against, ylabel=f"loss (mean of {smooth} steps)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save(figure, png)


def timelines(png: Png, runs: NamedTraces, /) -> None:
    """A measured step of each run, under the plan for the times that its passes took."""
    draw(png, [measured_panel(name, _read_trace(run)) for name, run in _named(runs)])


def memory(png: Png, runs: NamedTraces, /) -> None:
    """The activations that each stage keeps during a step of each run."""
    traces = [(name, _read_trace(run)) for name, run in _named(runs)]
    options = {"layout": "constrained", "squeeze": False, "sharey": True}
    figure, grid = pyplot().subplots(1, len(traces), figsize=(10, 3.2), **options)
    for axes, (name, trace) in zip(grid[0], traces, strict=True):
        for rank, (recorded, step) in enumerate(zip(trace.ranks, trace.typical_step(), strict=True)):
            kept = [(t, size) for t, size in recorded.kept_bytes if step.start <= t <= step.end]
            times = [0.0, *((t - step.start) * 1e3 for t, _ in kept)]
            sizes = [0.0, *(size / 1e6 for _, size in kept)]
            color, label = PALETTE[1 + rank % (len(PALETTE) - 1)], f"stage {trace.place(rank).stage}"
            axes.step(times, sizes, where="post", label=label, color=color)
        axes.set(title=name, xlabel="ms since the step began")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    grid[0, 0].set_ylabel("activations kept, MB")
    save(figure, png)


def holdings(png: Png, runs: NamedRuns, /) -> None:
    """What the fullest rank of each run holds: parameters, gradients, optimizer state, activations."""
    names, counts = zip(*((name, read_largest(run)) for name, run in _named(runs)), strict=True)
    figure, axes = pyplot().subplots(figsize=(1.6 + 1.3 * len(names), 3.6), layout="constrained")
    below = [0.0] * len(names)
    for kind, color, bars in zip(KINDS, PALETTE, zip(*counts, strict=True), strict=False):
        heights = [size / 1e6 for size in bars]
        axes.bar(names, heights, 0.6, below, label=kind, color=color)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set(ylabel="MB on the fullest rank")
    figure.legend(loc="outside right center", frameon=False, reverse=True)
    save(figure, png)


def layout(png: Png, /, dp: int = 2, pp: int = 3) -> None:
    """Which rank holds which stage of which replica, and who talks to whom.

    Args:
        dp: replicas of the pipeline.
        pp: stages of each.
    """
    for flag, count in (("--dp", dp), ("--pp", pp)):
        require(1 <= count <= 32, f"{flag} {count}: give 1 to 32")
    figure, axes = pyplot().subplots(figsize=(1.2 + 2.9 * pp, 0.8 + 1.6 * dp), layout="constrained")
    arrow = {"arrowstyle": "<->", "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    for rank in range(dp * pp):
        grid = Grid(rank, dp, pp)
        x, y = 2.9 * grid.stage, -1.6 * grid.replica
        axes.add_patch(pyplot().Rectangle((x, y), 1.7, 0.9, facecolor=COLORS["compute"], edgecolor="#2f6db3"))
        axes.text(x + 0.85, y + 0.45, f"rank {rank}\nstage {grid.stage}", ha="center", va="center", size=11)
        if grid.stage == 0:
            axes.text(x - 0.2, y + 0.45, f"replica {grid.replica}", ha="right", va="center", size=11)
        if not grid.is_last_stage:
            axes.annotate("", (x + 2.85, y + 0.45), (x + 1.75, y + 0.45), arrowprops={**arrow, "color": "#2f6db3"})
            if grid.replica == 0:
                axes.text(x + 2.3, y + 0.6, "activations,\ntheir gradients", ha="center", va="bottom", size=8)
        if grid.replica < dp - 1:
            axes.annotate("", (x + 0.85, y - 0.65), (x + 0.85, y - 0.05), arrowprops={**arrow, "color": "#c97a1c"})
            axes.text(x + 0.95, y - 0.35, "average of weights' gradients", ha="left", va="center", size=8)
    axes.set(xlim=(-1.2, 2.9 * pp - 0.5), ylim=(-1.6 * (dp - 1) - 0.2, 1.5), aspect="equal")
    axes.axis("off")
    save(figure, png)


def _named(runs: list[str]) -> list[tuple[str, Path]]:
    """What to call each run, and where it is: "NAME=RUN", or a run's folder, whose name it then has."""
    pairs = (run.partition("=") for run in runs)
    return [(name, Path(run)) if equals else (Path(name).name, Path(name)) for name, equals, run in pairs]


def _read_trace(run: Path) -> Trace:
    return read_chrome(run / "trace.json" if run.is_dir() else run)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run, step by step; `InputError` if there are none that can be read."""
    path = run / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            for name in ("loss", "validation_loss") if "validation_loss" in record else ("loss",):
                record[name] = math.nan if record[name] is None else float(record[name])
        require(bool(records), "no step has been recorded")
        return records
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: no metrics of a run; give NAME=RUN with a run's folder") from error


def places(records: list[dict[str, Any]], against: Against, run: Path) -> list[float]:
    """Where each record stands on the axis, after its step; `InputError` if it does not say."""
    try:
        if against == "seconds":
            return list(itertools.accumulate(float(record["seconds"]) for record in records))
        return [float(record["tokens"] if against == "tokens" else record["step"] + 1) for record in records]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{run / 'metrics.jsonl'}: its records have no {against}, which --against asks for") from error


def splits(png: Png, /, ranks: int = 3) -> None:
    """The two ways to split a matrix product over ranks, and what each has to exchange; a color is a rank.

    Args:
        ranks: how many share the product.
    """
    require(2 <= ranks < len(PALETTE), f"--ranks {ranks}: give 2 to {len(PALETTE) - 1}")
    figure, grid = pyplot().subplots(2, 1, figsize=(8, 3.8), layout="constrained")

    def matrix(axes: Any, x: float, width: float, height: float, name: str, cut: str) -> None:
        """A rectangle, whole or cut into a color for each rank: by "columns", by "rows", or into terms of a sum."""
        for rank in range(ranks if cut else 1):
            left, bottom, part_width, part_height = {
                "": (x, -height / 2, width, height),
                "columns": (x + rank * width / ranks, -height / 2, width / ranks, height),
                "rows": (x, height / 2 - (rank + 1) * height / ranks, width, height / ranks),
                "terms": (x + rank * 0.28, -height / 2 - rank * 0.14, width, height),
            }[cut]
            color = PALETTE[1 + rank] if cut else PALETTE[0]
            patch = pyplot().Rectangle((left, bottom), part_width, part_height, facecolor=color, edgecolor="white")
            axes.add_patch(patch)
        axes.text(x + width / 2, height / 2 + 0.15, name, ha="center", va="bottom", size=10)

    ways = (
        ("by outputs", "slices: gathered, or\nthe inputs of the next product", ("", "columns", "columns")),
        ("by inputs", "the terms are added up\n(all-reduce)", ("columns", "rows", "terms")),
    )
    for axes, (title, exchange, cuts) in zip(grid, ways, strict=True):
        matrix(axes, 0, 2, 1.2, "input (tokens, in)", cuts[0])
        matrix(axes, 2.7, 2, 2, "weight (in, out)", cuts[1])
        matrix(axes, 5.4, 2, 1.2, "output (tokens, out)", cuts[2])
        for x, sign in ((2.35, "\N{MULTIPLICATION SIGN}"), (5.05, "=")):
            axes.text(x, 0, sign, ha="center", va="center", size=16)
        axes.text(-0.3, 0, title, ha="right", va="center", size=12)
        axes.text(8.3, 0, exchange, ha="left", va="center", size=10)
        axes.set(xlim=(-1.9, 11.2), ylim=(-1.3, 1.6), aspect="equal")
        axes.axis("off")
    save(figure, png)


def topologies(png: Png, /, world_size: int = 8) -> None:
    """Who sends to whom, and when: broadcasts and all-reduces in a simulated world.

    A message's latency is a tenth of the time that the whole tensor takes; chunks take less, and are drawn thinner.

    Args:
        world_size: ranks.
    """
    require(2 <= world_size <= 32, f"--world-size {world_size}: give 2 to 32 ranks")
    tensor = torch.empty(840, device="meta")  # it has a size and no content
    link = Link(latency_seconds=0.1, bytes_per_second=tensor.nbytes)
    panels: dict[str, Callable[..., None]] = {
        "broadcast, naive": partial(broadcast_naive, src=0),
        "broadcast, tree": partial(broadcast_tree, src=0),
        "broadcast, ring": partial(broadcast_ring, src=0),
        **{f"all-reduce, {name}": all_reduce for name, all_reduce in ALL_REDUCES.items()},
        "all-reduce, ring": partial(allreduce_ring, both_ways_bytes=0),
    }
    figure, grid = pyplot().subplots(1, len(panels), figsize=(13, 5.4), layout="constrained", sharey=True)
    for axes, (title, collective) in zip(grid, panels.items(), strict=True):
        world = SimulatedWorld(world_size, link, keep_messages=True)
        world.run(lambda endpoint, run=collective: run(tensor, endpoint=endpoint))  # type: ignore[misc]
        for message in world.messages:
            color = PALETTE[1] if message.sender < message.receiver else PALETTE[2]
            width = 0.6 + 1.4 * message.size_bytes / tensor.nbytes
            arrow = {"arrowstyle": "-|>", "color": color, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
            start, end = (message.sender, message.started_seconds), (message.receiver, message.ended_seconds)
            axes.annotate("", end, start, arrowprops=arrow)
        for rank, seconds in enumerate(world.seconds):
            axes.plot([rank, rank], [0, seconds], color=PALETTE[0], linewidth=3, zorder=0)
        axes.set(title=title.replace(", ", "\n"), xlabel="rank", xticks=range(0, world_size, max(1, world_size // 4)))
    grid[0].set_ylabel("time, in transmissions of the whole tensor")
    grid[0].invert_yaxis()
    save(figure, png)


def collectives(png: Png, run: Annotated[Path, tyro.conf.Positional], /) -> None:
    """What each topology of each collective took against the size of the tensor, beside what was predicted.

    Args:
        run: folder of a run of `collectives/intro_collectives.py`.
    """
    try:
        rows = [json.loads(line) for line in (run / "collectives.jsonl").read_text().splitlines()]
        operations = list(dict.fromkeys(row["operation"] for row in rows))
        columns = {"topology", "size_bytes", "measured_seconds", "predicted_seconds"}
        require(bool(rows) and all(columns <= row.keys() for row in rows), "rows or columns are missing")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{run}: no table of collectives there ({error})") from error
    figure, grid = pyplot().subplots(2, 3, figsize=(11, 6.2), layout="constrained", sharex=True, sharey=True)
    handles: dict[str, Any] = {}
    for axes, operation in zip(grid.flat, operations, strict=False):
        for topology, color in zip(("naive", "tree", "butterfly", "ring", "library"), PALETTE[1:], strict=True):
            curve = [row for row in rows if (row["operation"], row["topology"]) == (operation, topology)]
            if not curve:
                continue
            sizes, measured = zip(*((row["size_bytes"], row["measured_seconds"] * 1e3) for row in curve), strict=True)
            [handles[topology]] = axes.plot(sizes, measured, "o-", ms=3, color=color)
            if all(row["predicted_seconds"] for row in curve):
                axes.plot(sizes, [row["predicted_seconds"] * 1e3 for row in curve], ":", color=color)
        axes.set(title=operation, xscale="log", yscale="log")
        axes.grid(alpha=0.25)
    place = "outside upper center"
    figure.legend(handles.values(), handles.keys(), loc=place, ncols=len(handles), frameon=False)
    figure.supxlabel("bytes of the tensor, or of all the parts")
    figure.supylabel("ms (dotted: predicted)")
    save(figure, png)


def moving_average(values: list[float], width: int) -> list[float]:
    """Each value's mean with those up to `width` - 1 steps before it."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


FIGURES = (losses, timelines, memory, holdings, layout, splits, topologies, collectives)
