"""Figures drawn from runs.

python -m distlab.figures imgs/dp_loss.png "one process=runs/a" "GA=runs/b" --title "Loss of the global batch"
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from simplellm.errors import InputError


@dataclass
class LossFigure:
    """Draw the loss of several runs against their steps."""

    png: tyro.conf.Positional[Path]
    """file to write"""
    runs: Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="NAME=RUN [NAME=RUN ...]")]
    """what to call each run, and its folder"""
    title: str = "Loss of the global batch"
    """line above the figure"""
    smooth: int = 15
    """steps of the moving average"""


def draw_losses(figure: LossFigure) -> None:
    """Write the PNG: one curve a run; later runs are drawn thinner, so that curves which coincide are all seen.

    Raises:
        InputError: a run is not given as NAME=RUN, or has no readable metrics.
    """
    if figure.smooth < 1:
        raise InputError(f"--smooth {figure.smooth}: the mean is of at least 1 step")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
    _, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    colors = ["#c9d6e8", "#2f6db3", "#e08a1e", "#b23a48", "#4c9a6a", "#7a5ba6"]
    for index, (name, run) in enumerate(named_run.partition("=")[::2] for named_run in figure.runs):
        losses = moving_average(read_losses(Path(run)), figure.smooth)
        axes.plot(
            losses,
            label=name,
            color=colors[index % len(colors)],
            linewidth=max(1.4, 6 - 3 * index),
            linestyle="--" if index == 2 else "-",
        )
    axes.set(title=figure.title, xlabel="step", ylabel=f"loss (mean of {figure.smooth} steps)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.png.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(figure.png, dpi=110)


def read_losses(run: Path) -> list[float]:
    """The losses that a run recorded, step by step.

    Raises:
        InputError: the folder holds no metrics that can be read.
    """
    path = run / "metrics.jsonl"
    try:
        return [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: no metrics of a run; give NAME=RUN with a run's folder") from error


def moving_average(values: list[float], width: int) -> list[float]:
    """Each value's mean with those up to `width` - 1 steps before it."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


if __name__ == "__main__":
    try:
        draw_losses(tyro.cli(LossFigure, description=__doc__))
    except InputError as error:
        raise SystemExit(f"# {error}") from None
