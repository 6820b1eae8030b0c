"""What bench/first_choice.py and bench/first_choice_links.py run."""

from types import ModuleType

import pytest
from support.chapters import load
from support.planner_machines import MODEL, cluster

from distlab.comm.link import Link
from distlab_planner.machine import AllReduce, Machine
from distlab_planner.search import find_layouts

COMPUTER = cluster(device="cpu", hosts=1, cores_per_host=2, slowdown=(1.0, 1.25, 2.0, 2.5))


@pytest.fixture(scope="module")
def first_choice() -> ModuleType:
    return load("bench/first_choice.py")


@pytest.fixture(scope="module")
def links(first_choice: ModuleType) -> ModuleType:
    return load("bench/first_choice_links.py")


def test_the_plans_first_layout_runs_beside_the_best_of_each_other_division(first_choice: ModuleType) -> None:
    rows = first_choice.best_of_each_division(MODEL, COMPUTER, 4)
    plan = find_layouts(MODEL, COMPUTER, 4, first_choice.BATCH, float("inf"), top=1).rows
    assert rows[0].step.seconds == plan[0].step.seconds
    seconds = [row.step.seconds for row in rows]
    assert seconds == sorted(seconds)
    divisions = [(row.layout.dp, row.layout.pp, row.layout.tp) for row in rows]
    assert len(set(divisions)) == len(divisions) > 1


def test_layouts_that_are_predicted_to_be_much_slower_are_not_measured_but_there_is_always_another(
    first_choice: ModuleType,
) -> None:
    for latency in (0.0, 1.0):  # with slow messages, all but one replica are slow
        slow: Machine = cluster(device="cpu", hosts=1, inside=Link(latency, 1e11))
        rows = first_choice.best_of_each_division(MODEL, slow, 4)
        limit = first_choice.SLOWEST * rows[0].step.seconds
        assert len(rows) > 1
        assert all(row.step.seconds <= limit for row in rows[2:])


def test_two_hosts_have_half_the_cores_and_no_memory_in_common(links: ModuleType) -> None:
    measured = (AllReduce(2, "gloo", (1e5,), (1e-3,)), AllReduce(2, "shared", (1e5,), (1e-4,)))
    machine: Machine = cluster(**{**vars(COMPUTER), "all_reduces": measured})
    hosts = links.two_hosts(machine, 2, links.Wire(1.25e6, 5e-3))
    assert (hosts.hosts, hosts.ranks_per_host, hosts.cores_per_host) == (2, 2, 1)
    assert hosts.between == Link(5e-3 + machine.inside.latency_seconds, 1.25e6)
    assert [entry.transport for entry in hosts.all_reduces] == ["gloo"]
    # Two ranks of a host compute while two of the other do: as four on one computer, beside two.
    assert hosts.slowdown == (1.0, 2.0)


def test_of_several_runs_over_a_link_the_fastest_counts(links: ModuleType) -> None:
    grids = [{(10, 0): {"a": (2.0, 1.0), "b": (3.0, 1.0)}}, {(10, 0): {"a": (4.0, 1.0), "b": (1.0, 1.0)}}]
    assert links.fastest(grids) == {(10, 0): {"a": (2.0, 1.0), "b": (1.0, 1.0)}}
