"""Layouts of the planner: the memory of each worker, as numbers, bars and a table."""

from dataclasses import asdict

from distlab_planner.costs import Costs
from distlab_planner.machine import Machine
from distlab_planner.memory import RankMemory, held
from distlab_planner.model import Model
from distlab_planner.search import Found
from distlab_planner.table import Row
from distlab_playground import drawing

GB = 1e9


def none_fits(found: Found) -> str:
    """Return why a search has found no layout."""
    if not found.layouts:
        return "No layout divides the batch, the heads and the layers; change one of them."
    return f"No layout fits; the smallest needs {found.least_bytes / GB:.1f} GB a rank."


def memory(row: Row, model: Model, machine: Machine, optimizer: str) -> list[RankMemory]:
    """Return what a rank of each worker of the pipeline holds."""
    costs = Costs(machine, model, row.layout, None, optimizer)
    return [held(costs, worker) for worker in range(row.layout.size("pp"))]


def bars(held: list[RankMemory], most_bytes: float) -> str:
    """Return a drawing of the memory of each worker by kind, with a line at the memory that a rank has."""
    parts = [{kind.replace("_", " "): size / GB for kind, size in asdict(one).items()} for one in held]
    end = max(most_bytes, *(one.total for one in held)) / GB
    about = "memory that a rank of each worker holds, by kind"
    return drawing.stacked(_names(held), parts, about, "GB", 2, end=end * 1.02, limit=most_bytes / GB)


def memory_table(held: list[RankMemory]) -> str:
    """Return the same numbers as a table."""
    kinds = list(asdict(held[0]))
    cells = [[f"{size / GB:.2f}" for size in (*asdict(one).values(), one.total)] for one in held]
    lines = [[name, *line] for name, line in zip(_names(held), cells, strict=True)]
    return drawing.table(["worker", *(kind.replace("_", " ") for kind in kinds), "total"], lines, "GB held, by kind")


def _names(held: list[RankMemory]) -> list[str]:
    return [f"worker {number}" for number in range(len(held))]
