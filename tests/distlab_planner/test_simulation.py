"""Schedules played on hosts whose cores and links ranks share, compared with times worked out by hand."""

from collections import Counter
from dataclasses import replace

import pytest

from distlab.pipeline.actions import Forward
from distlab_planner.simulation import Hosts, Work, play


def test_speed_changes_when_another_rank_begins_and_ends() -> None:
    """Worker 0 works alone for a second, then beside worker 1, then alone again."""
    hosts = Hosts([0, 0], [1, 1], lambda busy: max(1.0, busy))
    played = play([[Work(4.0)], [Work(1.0)]], hosts, lambda *_: 0.0, {})
    assert [line[0] for line in played.ends] == [5.0, 2.0]
    apart = play([[Work(4.0)], [Work(1.0)]], replace(hosts, of=[0, 1]), lambda *_: 0.0, {})
    assert [line[0] for line in apart.ends] == [4.0, 1.0]


def test_threads_that_spin_slow_the_threads_of_the_next_rank() -> None:
    """Two ranks take turns on two cores, with two threads each."""
    hosts = Hosts([0, 0], [1, 1], lambda busy: max(1.0, busy / 2), cores=2, spin_seconds=0.5)
    ends = play([[Work(4.0, threads=2)], [Work(0.0), *[Work(4.0, threads=2)]]], hosts, lambda *_: 0.0, {}).ends
    assert max(line[-1] for line in ends) == 8.0  # at the same time: each has half of the cores
    first, second = Forward(0, 0), Forward(1, 0)
    works = [[Work(4.0, 2, first)], [Work(4.0, 2, second, tuple(second.needs(2)))]]
    after = play(works, replace(hosts, load=Counter()), lambda *_: 0.0, {0: 0, 1: 1})
    # Three threads on two cores: spinning takes 1.5 times as long, while the second rank computes at half its speed.
    assert [line[-1] for line in after.ends] == [4.0, pytest.approx(8.0 + 0.5 * 1.5 / 2)]
    again = [[Work(4.0, 2, first), Work(4.0, 2)], [Work(0.0)]]
    assert play(again, replace(hosts, load=Counter()), lambda *_: 0.0, {0: 0, 1: 1}).makespan == 8.0


def test_a_pass_takes_longer_after_a_message_and_longer_still_after_a_wait() -> None:
    """Stage 1 waits a second for the first micro-batch; the second is there before the first pass has ended."""
    hosts = Hosts([0, 1], [1, 1], lambda busy: 1.0, waking=lambda idle: 1.0 + idle)
    works = [
        [Work(seconds, 1, action, tuple(action.needs(2))) for action in (Forward(stage, 0), Forward(stage, 1))]
        for stage, seconds in enumerate((1.0, 3.0))
    ]
    played = play(works, hosts, lambda *_: 0.0, {0: 0, 1: 1})
    assert played.ends == [[1, 2], [6, 10]]


def test_a_message_waits_for_the_one_that_was_sent_before_it() -> None:
    """A message keeps the link busy for 3 of the 5 seconds that it takes; the second is computed after 2 seconds."""
    hosts = Hosts([0, 1], [1, 1], lambda busy: 1.0)
    works = [
        [Work(1.0, 1, action, tuple(action.needs(2))) for action in (Forward(stage, 0), Forward(stage, 1))]
        for stage in (0, 1)
    ]
    played = play(works, hosts, lambda *_: 5.0, {0: 0, 1: 1}, carrying=lambda *_: 3.0)
    assert played.ends == [[1.0, 2.0], [7.0, 10.0]]
