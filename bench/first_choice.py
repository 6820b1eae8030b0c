"""Whether the planner's first choice is the fastest layout: real runs of it, in turns with others.

python bench/first_choice.py --machine runs/machine.json

For each model and number of ranks, the planner's first choice runs in turns with its best layout of each other division
into replicas, stages and slices, all at the same time: while one takes two steps, the others wait.
"""

import itertools
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from calibrations import machine_of, sizes_of
from layout_runs import Case, measure, undisturbed
from planner import BATCH, MODELS
from tables import print_head, print_row
from turns import each, quartiles_of_ratios, require_quartiles

from distlab_planner.layouts import Choices, RunLayout
from distlab_planner.machine import Machine
from distlab_planner.model import Model
from distlab_planner.search import find_layouts
from distlab_planner.table import Row
from simplellm import command_line
from simplellm.errors import require

FLAGS = {
    "small": MODELS["small"],
    "large": MODELS["large"],
    "deep": "--dmodel 64 --num-heads 4 --n-layers 12 --seq-len 48",
}
SLOWEST = 1.5  # layouts predicted to take this many times the first choice's time are not measured, if there are others


@dataclass
class Settings:
    """What to measure."""

    machine: Path = Path("runs/machine.json")
    """the machine, as distlab.calibrate writes it; what it has not got of the models is measured"""
    ranks: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")] = (2, 3, 4, 6)
    """numbers of ranks"""
    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = tuple(FLAGS)
    """of these models"""
    turns: int = 15
    """turns of each layout, of two steps each; the median counts"""


def model_of(name: str) -> Model:
    words = FLAGS[name].split()
    return Model(sizes_of(FLAGS[name]), int(words[words.index("--n-layers") + 1]))


def best_of_each_division(model: Model, machine: Machine, ranks: int) -> list[Row]:
    """The planner's first choice, and its best layout of each other division that may be as fast."""
    found = []
    for pp, tp in itertools.product(range(1, ranks + 1), repeat=2):
        if ranks % (pp * tp) == 0:
            choices = Choices({"dp": (ranks // pp // tp,), "pp": (pp,), "tp": (tp,)})
            found += find_layouts(model, machine, ranks, BATCH, float("inf"), choices=choices, top=1).rows
    found.sort(key=lambda row: row.step.seconds)
    require(len(found) > 1, f"--ranks {ranks}: {BATCH} sequences allow fewer than two divisions")
    slowest = max(found[1].step.seconds, SLOWEST * found[0].step.seconds)
    return [row for row in found if row.step.seconds <= slowest]


def described(layout: RunLayout, model: Model) -> str:
    """Its flags, without the batch, which the number of replicas decides."""
    words = layout.flags(model).split()
    at = words.index("--batch-size")
    return " ".join(words[:at] + words[at + 2 :])


def row_of(name: str, ranks: int, settings: Settings, machine: Machine, port: int) -> list[object]:
    """The cells of a row: the first choice, and the fastest of the others."""
    model = model_of(name)
    machine = machine.with_room_for(ranks, str(settings.machine))
    rows = best_of_each_division(model, machine, ranks)
    every = f"{FLAGS[name]} --data sample --device cpu".split()
    cases = [Case(str(row.layout), [*every, *row.layout.flags(model).split()], ranks) for row in rows]
    records = measure(cases, machine, model.sizes, settings.turns, port)
    times = [undisturbed(record, machine, model.sizes) for record in records]
    medians = [statistics.median(of_one) for of_one in times]
    shown = [
        (f"`{described(row.layout, model)}`", f"{row.step.seconds * 1e3:,.0f} / {median * 1e3:,.0f}")
        for row, median in zip(rows, medians, strict=True)
    ]
    other = 1 + medians[1:].index(min(medians[1:]))
    return [name, ranks, len(rows), *shown[0], *shown[other], quartiles_of_ratios(times[0], times[other])]


def main(settings: Settings) -> None:
    os.environ.pop("OMP_NUM_THREADS", None)  # or a rank that is alone would compute with one thread
    require_quartiles("--turns", settings.turns)
    for name in settings.models:
        require(name in FLAGS, f"--models {name}: there are {', '.join(FLAGS)}")
    machine = machine_of(settings.machine, {name: FLAGS[name] for name in settings.models})
    rows = []
    for number, (name, ranks) in enumerate(each(list(itertools.product(settings.models, settings.ranks)), "cells")):
        port = 21_000 + (os.getpid() + 20 * number) % 4000
        rows.append(row_of(name, ranks, settings, machine, port))
    heads = "ms, predicted / measured:", "fastest other", "ms, predicted / measured:", "first ÷ other (quartiles):"
    print_head("model", "ranks:", "layouts:", "first choice", *heads)
    for row in rows:
        print_row(*row)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__ or "")
