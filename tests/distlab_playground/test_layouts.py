"""The memory that a layout of the playground holds, as it is drawn and as a table."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.planner_machines import CLUSTER, MODEL

from distlab_planner.layouts import RunLayout
from distlab_planner.search import Found
from distlab_playground import drawing, layouts


def test_a_search_without_a_layout_says_why() -> None:
    assert layouts.none_fits(Found()).startswith("No layout divides the batch, the heads and the layers")
    too_large = Found(layouts=3, too_large=3, least_bytes=2.5e9)
    assert layouts.none_fits(too_large) == "No layout fits; the smallest needs 2.5 GB a rank."


def test_the_state_of_a_layout_is_that_of_its_optimizer() -> None:
    row: Any = SimpleNamespace(layout=RunLayout({"dp": 1}, 2, 1, "dapple", "none", "none", (MODEL.n_layers,)))
    [[adam], [sgd]] = (layouts.memory(row, MODEL, CLUSTER, optimizer) for optimizer in ("adam", "sgd"))
    assert (adam.optimizer_state, sgd.optimizer_state) == (2 * adam.parameters, 0)
    drawn = layouts.bars([adam], 2 * adam.total)  # with a line where the memory of a rank ends
    bars, [limit] = re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)"', drawn), re.findall(r'd="M([\d.]+) 0V', drawn)
    assert float(limit) - drawing.LEFT == pytest.approx(2 * (sum(map(float, bars[-1])) - drawing.LEFT), rel=1e-3)
    assert float(limit) < drawing.WIDTH
    too_large = layouts.bars([sgd, adam], adam.total / 2)
    ends = [sum(map(float, bar)) for bar in re.findall(r'class="bar" x="([\d.]+)" y="\d+" width="([\d.]+)"', too_large)]
    assert max(ends) < drawing.WIDTH, "also what does not fit"
    cells = re.findall(r">([\d.]+)</td>", layouts.memory_table([adam, replace(adam, optimizer_state=2 * 10**9)]))
    width = len(cells) // 2
    assert sum(a != b for a, b in zip(cells[:width], cells[width:], strict=True)) == 2, "the state and the total"
