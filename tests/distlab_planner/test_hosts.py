"""Schedules played on hosts whose cores ranks share, compared with times worked out by hand."""

from collections.abc import Callable, Sequence

import pytest

from distlab.pipeline.actions import Action, ActionCosts, Forward, Result
from distlab.pipeline.engine import Engine, Graph
from distlab_planner.hosts import SharedHosts

pytestmark = pytest.mark.quick


class Busy(Action):
    """Needs nothing; its stage is its worker."""

    letter = "Y"

    def needs(self, stages: int) -> list[Result]:
        return []

    def seconds(self, costs: ActionCosts) -> float:
        return 4.0


def ends(
    programs: Sequence[Sequence[Action]], hosts: SharedHosts, seconds: Callable[[Action], float] = lambda _: 4.0
) -> list[list[float]]:
    """When the actions of each worker end; messages take no time."""
    played = Engine(Graph(programs), seconds, hosts=hosts)
    return [[played.ends[index] for index in line] for line in played.graph.lines]


def two_threads(action: Action) -> int:
    return 2


def busy(threads: float) -> float:
    """Each core is shared equally."""
    return max(1.0, threads)


def test_speed_changes_when_another_rank_begins_and_ends() -> None:
    """Worker 0 works alone for a second, then beside worker 1, then alone again."""

    def seconds(action: Action) -> float:
        return {0: 4.0, 1: 1.0}[action.stage]

    programs = [[Busy(0, 0)], [Busy(1, 0)]]
    assert ends(programs, SharedHosts([0, 0], [1, 1], busy), seconds) == [[5.0], [2.0]]
    assert ends(programs, SharedHosts([0, 1], [1, 1], busy), seconds) == [[4.0], [1.0]]


def test_threads_that_spin_slow_the_threads_of_the_next_rank() -> None:
    """Two ranks take turns on two cores, with two threads each."""

    def hosts() -> SharedHosts:
        return SharedHosts([0, 0], [1, 1], lambda threads: max(1.0, threads / 2), two_threads, 2, 0.5)

    at_once = ends([[Busy(0, 0)], [Busy(1, 0)]], hosts())
    assert max(line[-1] for line in at_once) == 8.0  # each has half of the cores
    in_turn = ends([[Forward(0, 0)], [Forward(1, 0)]], hosts())
    # Three threads on two cores: spinning takes 1.5 times as long, while the second rank computes at half its speed.
    assert [line[-1] for line in in_turn] == [4.0, pytest.approx(8.0 + 0.5 * 1.5 / 2)]
    assert ends([[Busy(0, 0), Busy(0, 1)]], SharedHosts([0], [1], lambda _: 1.0, two_threads, 2, 0.5)) == [[4.0, 8.0]]


def test_an_action_that_is_slowed_sends_later() -> None:
    """Stage 1 and a rank that shares the host of stage 0 begin at once; its message comes after 2 · 4 seconds."""
    programs: list[list[Action]] = [[Forward(0, 0)], [Forward(1, 0)], [Busy(2, 0)]]
    assert ends(programs, SharedHosts([0, 1, 0], [1, 1, 1], busy)) == [[8.0], [12.0], [8.0]]
