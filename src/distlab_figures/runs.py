"""Figures drawn from runs."""

import math
import statistics
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from distlab.reports import style
from distlab.reports.memory import MEMORY_KINDS, ONLY_SOME
from distlab.reports.records import read_largest
from distlab.reports.timeline import draw, draw_schedules, measured_panel
from distlab_figures.diagrams import Png
from distlab_figures.records import (
    Against,
    column,
    moving_average,
    named_runs,
    named_traces,
    places,
    read_collectives,
    read_metrics,
)
from simplellm.errors import InputError, require

HELP = "name and folder of each run"
NAMED_RUNS = partial(tyro.conf.arg, metavar="[NAME=]RUN [[NAME=]RUN ...]")
NamedRuns = Annotated[tyro.conf.Positional[list[str]], NAMED_RUNS(help=HELP)]
TRACED_HELP = f"{HELP} (or its trace file); the runs need --trace"
NamedTraces = Annotated[tyro.conf.Positional[list[str]], NAMED_RUNS(help=TRACED_HELP)]
Recorded = Literal["loss", "lr", "grad_norm", "max_over_mean_load"]
CURVES = {
    "loss": "loss of the global batch",
    "lr": "learning rate",
    "grad_norm": "norm of the gradients",
    "max_over_mean_load": "tokens of the fullest expert, relative to the mean",
}
SMALLEST_PARTING = 1e-9  # of losses in a figure; those of equal losses are drawn there
# Of `MEMORY_KINDS`; the same colors as the passes that create them.
HOLDINGS = style.BLUE, style.ORANGE, style.GREEN, style.YELLOW, style.PURPLE, style.SKY


def losses(
    png: Png,
    runs: NamedRuns,
    /,
    of: Recorded = "loss",
    title: str | None = None,
    smooth: int = 15,
    against: Against = "steps",
) -> None:
    """The training loss of several runs and, as dots, their validation loss; or another curve of their records.

    Lines of later runs are thinner, so that all curves remain visible where they coincide.

    Args:
        of: what to draw: the loss, the learning rate of each step, the norm of its gradients before clipping, or the
            load of the fullest expert.
        title: title of the figure.
        smooth: number of steps in the moving average; a learning rate is not averaged.
        against: the x axis; seconds are the time spent in steps, tokens are counted over all ranks.
    """
    require(smooth >= 1, f"--smooth {smooth}: give at least 1 step")
    smooth = 1 if of == "lr" else smooth
    figure, axes = style.subplots(4.4)
    dots: dict[str, Any] = {"linestyle": "none", "marker": "o", "markeredgecolor": style.INK, "markeredgewidth": 0.8}
    has_validation = False
    for index, (name, run) in enumerate(named_runs(runs)):
        color = style.SERIES[index % len(style.SERIES)]
        records = read_metrics(run)
        where = places(records, against, run)
        values = column(records, of, "--of", run)
        reported = [step for step, value in enumerate(values) if not math.isnan(value)]  # with --report-every, not all
        require(bool(reported), f"{run / 'metrics.jsonl'}: none of its steps has a {of}")
        means = moving_average([values[step] for step in reported], smooth)
        width, dashes = max(1.6, 6 - 3 * index), "--" if index == 2 else "-"
        curve = {"label": style.plain(name), "color": color, "linewidth": width, "linestyle": dashes}
        axes.plot([where[step] for step in reported], means, **curve)
        dotted = [(x, r) for x, r in zip(where, records, strict=True) if of == "loss" and "validation_loss" in r]
        validated = [(x, record["validation_loss"]) for x, record in dotted]
        if validated:
            axes.plot(*zip(*validated, strict=True), color=color, **dots)
            has_validation = True
    if has_validation:
        axes.plot([], [], color=style.BACKGROUND, label="validation", **dots)
    label = CURVES[of] if smooth == 1 else f"{of.replace('_', ' ')} (mean of {smooth} steps)"
    axes.set(title=style.plain(title or CURVES[of].capitalize()), xlabel=against, ylabel=label)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.legend()
    style.save(figure, png)


def timelines(png: Png, runs: NamedTraces, /, compact: bool = False) -> None:
    """A measured step of each run, together with the plan for the times that its passes took.

    Args:
        compact: draw many schedules on one axis of time, each measured step as a whole under its plan.
    """
    traces = named_traces(runs)
    if compact:
        draw_schedules(png, traces)
    else:
        draw(png, [measured_panel(name, trace) for name, trace in traces])


def memory(png: Png, runs: NamedTraces, /) -> None:
    """The activations that each stage keeps during a step of each run."""
    traces = named_traces(runs)
    figure, grid = style.subplots(3.6, 1, len(traces), squeeze=False, sharey=True)
    curves: dict[str, Any] = {}
    has_kept = False
    for axes, (name, trace) in zip(grid[0], traces, strict=True):
        for rank, (recorded, step) in enumerate(zip(trace.ranks, trace.typical_step(), strict=True)):
            kept = [(t, size) for t, size in recorded.kept_bytes if step.start <= t <= step.end]
            times = [0.0, *((t - step.start) * 1e3 for t, _ in kept)]
            sizes = [0.0, *(size / 1e6 for _, size in kept)]
            has_kept = has_kept or bool(kept)
            stage = trace.worker(rank)
            color = style.SERIES[stage % len(style.SERIES)]
            [curves[f"stage {stage}"]] = axes.step(times, sizes, where="post", color=color)
        axes.set(title=style.plain(name), xlabel="ms since the step began")
    require(has_kept, "these traces have no stages that keep activations: give those of pipelines")
    grid[0, 0].set_ylabel("activations kept, MB")
    style.legend(figure, curves)
    style.save(figure, png)


def holdings(png: Png, runs: NamedRuns, /) -> None:
    """The memory of the fullest rank of each run: parameters, gradients, optimizer state, activations."""
    names, counts = zip(*((name, read_largest(run)) for name, run in named_runs(runs)), strict=True)
    figure, axes = style.subplots(3.8)
    below = [0.0] * len(names)
    kinds: dict[str, Any] = {}
    for kind, color, sizes in zip(MEMORY_KINDS, HOLDINGS, zip(*counts, strict=True), strict=True):
        heights = [size / 1e6 for size in sizes]
        if kind in ONLY_SOME and not any(heights):
            continue
        kinds[kind] = axes.bar(range(len(names)), heights, 0.6, below, color=color, edgecolor=style.BACKGROUND)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.bar_label(kinds[kind], [f"{total:.0f}" for total in below], padding=2)
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="memory of the fullest rank, MB")
    axes.grid(visible=False, axis="x")
    style.legend(figure, kinds)
    style.save(figure, png)


def expert_loads(png: Png, runs: NamedRuns, /, layer: int = 0, title: str | None = None) -> None:
    """The tokens of each expert of a layer over the steps of each run, relative to the mean.

    Args:
        layer: number of the layer among those of the rank that wrote the records.
        title: title of the figure.
    """
    named = named_runs(runs)
    figure, grid = style.subplots(3.2, 1, len(named), squeeze=False, sharey=True)
    for axes, (name, run) in zip(grid[0], named, strict=True):
        records = read_metrics(run)
        try:
            loads = [record["expert_loads"][layer] for record in records]
        except (LookupError, TypeError) as error:
            sentence = f"its records have no loads of experts in layer {layer}; give a run with --experts"
            raise InputError(f"{run / 'metrics.jsonl'}: {sentence}") from error
        relative = [[own * len(load) / sum(load) for own in load] for load in loads]
        for expert, curve in enumerate(zip(*relative, strict=True)):
            color = style.SERIES[expert % len(style.SERIES)]
            axes.plot(places(records, "steps", run), curve, color=color, linewidth=1)
        axes.axhline(1, color=style.INK, linewidth=0.8)
        axes.set(title=style.plain(name), xlabel="steps")
    grid[0][0].set(ylabel="tokens of each expert / mean", ylim=(0, None))
    figure.suptitle(style.plain(title or f"Load of the experts of layer {layer}"))
    style.save(figure, png)


def partings(png: Png, runs: NamedRuns, /, title: str | None = None) -> None:
    """How far the losses of several runs are from those of the first one, relative to them, step by step.

    A vertical line marks the first step in which a run with --replay-routes would have chosen other experts.

    Args:
        title: title of the figure.
    """
    (_, first), *others = named_runs(runs)
    require(bool(others), "give at least two runs: the first one is the one that others are compared with")
    expected = {record["step"]: record["loss"] for record in read_metrics(first)}
    figure, axes = style.subplots(3.8)
    for index, (name, run) in enumerate(others):
        records, color = read_metrics(run), style.SERIES[index % len(style.SERIES)]
        apart = {
            record["step"]: abs(record["loss"] / expected[record["step"]] - 1)
            for record in records
            if record["step"] in expected and not math.isnan(record["loss"] + expected[record["step"]])
        }
        require(bool(apart), f"{run / 'metrics.jsonl'}: none of its steps has a loss that {first} has too")
        shown = [max(one, SMALLEST_PARTING) for one in apart.values()]
        axes.plot([*apart], shown, label=style.plain(name), color=color)
        parted = next((record["step"] for record in records if record.get("other_routes")), None)
        if parted is not None:
            axes.axvline(parted, color=color, linewidth=0.8, linestyle="--", label="first token with another route")
    axes.set(title=style.plain(title or "Difference of the losses"), xlabel="steps", yscale="log")
    axes.set_ylabel("relative difference of the loss")
    axes.legend()
    style.save(figure, png)


def ring_steps(png: Png, runs: NamedTraces, /) -> None:
    """The time that each rank computes in each step of the ring, forward and backward, in a layer of each run.

    Medians over layers and steps, so that few interruptions by other programs count.
    """
    traces = named_traces(runs)
    figure, grid = style.subplots(2.6, 1, len(traces), squeeze=False, sharey=True)
    legend: dict[str, Any] = {}
    for axes, (name, trace) in zip(grid[0], traces, strict=True):
        ranks, work = range(len(trace.ranks)), []
        for rank in ranks:
            seconds = trace.seconds_in_ring(rank)
            work.append(sum(seconds.values()))
            require(work[-1] > 0, f"{name}: rank {rank} was in no ring; give runs of cp-ring, or of 5d with --cp")
            left = 0.0
            for step, taken in sorted(seconds.items()):
                color = style.SERIES[step % len(style.SERIES)]
                legend[f"step {step}"] = axes.barh(rank, taken * 1e3, left=left * 1e3, color=color)
                left += taken
        most = max(work) / statistics.fmean(work)
        title = f"{style.plain(name)}: busiest rank {most:.2f} \N{MULTIPLICATION SIGN} the mean"
        axes.set(title=title, xlabel="ms in a layer", yticks=ranks, ylim=(len(ranks) - 0.5, -0.5))
        axes.set_yticklabels([f"rank {rank}" for rank in ranks])
    style.legend(figure, legend)
    style.save(figure, png)


def sharding(png: Png, runs: NamedRuns, /) -> None:
    """The bytes per weight that a rank of `dp-zero` holds with Adam; runs are named like "optimizer-2"."""
    stages = {"optimizer": (8, 8), "gradients": (4, 12), "weights": (0, 16)}  # a + b / n
    counted: dict[str, list[tuple[int, float, float]]] = {shard: [] for shard in stages}
    for name, run in named_runs(runs):
        *held, gathered, _ = read_largest(run)
        shard, _, number = name.partition("-")
        is_right = shard in stages and number.isdigit() and int(number) > 0
        require(is_right, f"{name}: name a run by what it shards and its ranks, like optimizer-2")
        ranks = int(number)
        weights = held[0] / 4 * (ranks if shard == "weights" else 1)
        counted[shard].append((ranks, sum(held) / weights, (sum(held) + gathered) / weights))
    figure, axes = style.subplots(3.8)
    most = max((ranks for of_one in counted.values() for ranks, *_ in of_one), default=8)
    sizes = [1 + step / 20 for step in range(20 * (most - 1) + 1)]
    legend: dict[str, Any] = {"none": axes.axhline(16, color=style.INK)}
    for (shard, (same, shared)), color in zip(stages.items(), style.SERIES, strict=False):
        [legend[f"{shard}: {f'{same} + ' if same else ''}{shared}/n"]] = axes.plot(
            sizes, [same + shared / n for n in sizes], color=color
        )
        points = sorted(counted[shard])
        axes.plot([n for n, *_ in points], [all_the_time for _, all_the_time, _ in points], "o", color=color)
        axes.plot([n for n, *_ in points], [peak for *_, peak in points], "_", color=color, markersize=12)
    axes.set(xlabel="ranks (n)", ylabel="bytes per weight on a rank", ylim=(0, None), xticks=range(1, most + 1))
    style.legend(figure, legend)
    style.save(figure, png)


def collectives(png: Png, run: Annotated[Path, tyro.conf.Positional], /) -> None:
    """The time of each topology of each collective against the size of the tensor, measured and predicted.

    Args:
        run: folder of a run of `collectives/compare_collectives.py`.
    """
    rows = read_collectives(run)
    operations = dict.fromkeys(row["operation"] for row in rows)
    figure, grid = style.subplots(8.4, 3, 2, sharex=True, sharey=True)
    colors = dict(zip(("naive", "tree", "butterfly", "ring", "library", "shared"), style.SERIES, strict=False))
    curves: dict[str, Any] = {}
    for axes, operation in zip(grid.flat, operations, strict=False):
        for topology, color in colors.items():
            curve = [row for row in rows if (row["operation"], row["topology"]) == (operation, topology)]
            if not curve:
                continue
            sizes, measured = zip(*((row["size_bytes"], row["measured_seconds"]) for row in curve), strict=True)
            [curves[topology]] = axes.plot(sizes, measured, "o-", color=color)
            if all(row["predicted_seconds"] for row in curve):
                predicted = [row["predicted_seconds"] for row in curve]
                axes.plot(sizes, predicted, ":", color=color)
        _set_logarithmic(axes, title=operation)
    [curves["predicted"]] = axes.plot([], [], ":", color=style.INK)
    style.legend(figure, {name: curves[name] for name in (*colors, "predicted") if name in curves})
    figure.supxlabel("size of the tensor, or of all its parts")
    style.save(figure, png)


def shared_memory(png: Png, run: Annotated[Path, tyro.conf.Positional], /) -> None:
    """The time of an all-reduce against the size of the tensor: through sockets, and in shared memory.

    Args:
        run: folder of a run of `collectives/compare_collectives.py`.
    """
    rows = [row for row in read_collectives(run) if row["operation"] == "all-reduce"]
    names = {"library": "sockets, the library's", "ring": "sockets, the lab's ring", "shared": "shared memory"}
    require(names.keys() <= {row["topology"] for row in rows}, f"{run}: its ranks did not share memory")
    figure, axes = style.subplots(3.4)
    curves = {}
    for (topology, name), color in zip(names.items(), style.SERIES, strict=False):
        curve = [(row["size_bytes"], row["measured_seconds"]) for row in rows if row["topology"] == topology]
        [curves[name]] = axes.plot(*zip(*curve, strict=True), "o-", color=color)
    _set_logarithmic(axes, xlabel="size of the tensor")
    style.legend(figure, curves)
    style.save(figure, png)


def _set_logarithmic(axes: Any, **texts: str) -> None:
    """Make the axes logarithmic, in bytes and seconds."""
    axes.set(xscale="log", yscale="log", **texts)
    axes.xaxis.set_major_formatter(style.units("B"))
    axes.yaxis.set_major_formatter(style.units("s"))
