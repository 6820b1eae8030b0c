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
    programs[1].append(Busy(1, 1))
    assert ends(programs, SharedHosts([0, 0], [1, 1], busy), seconds) == [[6.0], [2.0, 4.0]], "another begins at once"


def test_an_action_ends_with_the_slowest_of_its_threads() -> None:
    """Rank 0 has two threads, one of them on the core of rank 1, which ends at 6; then it is alone."""
    threads = {0: 2, 1: 1}
    hosts = SharedHosts([0, 0], [1, 1], lambda busy: max(1.0, busy / 2), lambda action: threads[action.stage], 2)
    assert ends([[Busy(0, 0)], [Busy(1, 0)]], hosts) == [[7.0], [6.0]]


def test_ranks_share_the_cores_if_each_has_a_thread_for_every_core() -> None:
    alone: list[list[Action]] = [[Busy(0, 0), Busy(0, 1)]]
    both: list[list[Action]] = [[Busy(0, 0)], [Busy(1, 0)]]
    for programs, expected in ((alone, [[4.0, 8.0]]), (both, [[8.0], [8.0]])):
        hosts = SharedHosts([0, 0], [1, 1], lambda busy: max(1.0, busy / 2), lambda _: 2, 2)
        assert ends(programs, hosts) == expected


def test_an_action_that_is_slowed_sends_later() -> None:
    """Stage 1 and a rank that shares the host of stage 0 begin at once; its message comes after 2 · 4 seconds."""
    programs: list[list[Action]] = [[Forward(0, 0)], [Forward(1, 0)], [Busy(2, 0)]]
    assert ends(programs, SharedHosts([0, 1, 0], [1, 1, 1], busy)) == [[8.0], [12.0], [8.0]]
