"""The search for the best layouts of a run on a machine."""

import math
from dataclasses import replace

import pytest
from support.planner_machines import MODEL, cluster
from support.processes import LAB

from distlab_planner import search
from distlab_planner.costs import Costs
from distlab_planner.layouts import Choices, layouts
from distlab_planner.machine import read_machine
from distlab_planner.memory import RankMemory, held, process_bytes
from distlab_planner.plan import PlanRequest
from distlab_planner.step import Step, predict
from distlab_planner.table import HEADS

CLUSTER = LAB / "docs/machines/cluster.json"
FEW = Choices(micro_batches=(1, 2, 4), schedules=("gpipe", "dapple", "zb-h1"), recompute=("none",))
RANKS, SEQUENCES = 8, 16


@pytest.mark.parametrize("top", [1, 5, 20])
def test_a_search_finds_what_playing_all_layouts_finds(top: int) -> None:
    machine = cluster(ranks_per_host=4, pass_seconds=1e-4)
    seconds = []
    for layout in layouts(MODEL, RANKS, SEQUENCES, FEW, machine.ranks_per_host):
        costs = Costs(machine, MODEL, layout)
        seconds.append(predict(replace(costs, layout=replace(layout, split=costs.balanced_split()))).seconds)
    found = search.find_layouts(MODEL, machine, RANKS, SEQUENCES, float("inf"), choices=FEW, top=top)
    assert [row.step.seconds for row in found.rows] == pytest.approx(sorted(seconds)[:top])
    assert (found.layouts, found.too_large) == (len(seconds), 0)
    assert found.too_slow > 0


def test_layouts_that_do_not_fit_are_counted_as_far_as_the_search_goes() -> None:
    machine = cluster(process_bytes=1e6)
    needed = []
    for layout in layouts(MODEL, RANKS, SEQUENCES, FEW, machine.ranks_per_host):
        costs = Costs(machine, MODEL, layout)
        costs = replace(costs, layout=replace(layout, split=costs.balanced_split()))
        workers = range(layout.size("pp"))
        needed.append(max(process_bytes(costs, worker, held(costs, worker)) for worker in workers))
    most_bytes = sorted(needed)[len(needed) // 2]
    too_large = sum(size > most_bytes for size in needed)

    def search_for(top: int, optimizer: str = "adam") -> search.Found:
        limits = RANKS, SEQUENCES, most_bytes
        return search.find_layouts(MODEL, machine, *limits, choices=FEW, top=top, optimizer=optimizer)

    every = search_for(len(needed))
    assert (len(every.rows), every.too_large, every.too_slow) == (len(needed) - too_large, too_large, 0)
    assert every.least_bytes == min(size for size in needed if size > most_bytes)
    first = search_for(1)
    assert first.rows[0].step.seconds == every.rows[0].step.seconds
    assert 0 < first.too_large < too_large
    assert first.too_slow > 0
    for optimizer, rows in (("adam", every.rows), ("sgd", search_for(len(needed), "sgd").rows)):
        for row in rows:
            costs = Costs(machine, MODEL, row.layout, optimizer=optimizer)
            assert row.held_bytes == max(held(costs, worker).total for worker in range(row.layout.size("pp")))
            needs = max(process_bytes(costs, worker, held(costs, worker)) for worker in range(row.layout.size("pp")))
            assert row.cells(1, SEQUENCES)[HEADS.index("memory, MB")] == f"{needs / 1e6:,.0f}"


def test_few_layouts_of_a_large_plan_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    played = []

    def predict_and_count(costs: Costs) -> Step:
        played.append(costs.layout)
        return predict(costs)

    monkeypatch.setattr(search, "predict", predict_and_count)
    request = PlanRequest(dmodel=8192, num_heads=64, n_layers=16, seq_len=4096)
    found = search.find_layouts(request.model, read_machine(CLUSTER), 16, 16, 80e9)
    assert found.layouts > 2000
    assert len(played) < found.layouts / 10, f"{len(played)} of {found.layouts}"
    assert found.layouts == len(played) + found.too_large + found.too_slow


def test_the_activations_of_layouts_that_cannot_fit_are_seldom_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def hold(costs: Costs, worker: int) -> RankMemory:
        counted.append(costs.layout)
        return held(costs, worker)

    monkeypatch.setattr(search, "held", hold)
    request = PlanRequest(dmodel=8192, num_heads=64, n_layers=16)
    found = search.find_layouts(request.model, read_machine(CLUSTER), 8, 16, 1e9)
    assert found.too_large == found.layouts > 500
    assert 1e9 < found.least_bytes < math.inf
    assert len({id(layout) for layout in counted}) < found.layouts / 5
