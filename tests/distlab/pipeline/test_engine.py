"""The engine: messages that wait for each other, workers that wake up, and orders that are decided meanwhile."""

import pytest

from distlab.pipeline.actions import Action, Backward, Forward
from distlab.pipeline.engine import Engine, Graph, InOrder

pytestmark = pytest.mark.quick

TWO_STAGES: list[list[Action]] = [[Forward(stage, k) for k in (0, 1)] for stage in (0, 1)]


def ends(played: Engine) -> list[list[float]]:
    """When the actions of each worker end."""
    return [[played.ends[index] for index in line] for line in played.graph.lines]


def test_a_pass_takes_longer_after_a_message_and_longer_still_after_a_wait() -> None:
    """Stage 1 waits a second for the first micro-batch; the second is there before the first pass has ended."""
    graph = Graph(TWO_STAGES)
    played = Engine(graph, lambda a: (1.0, 3.0)[a.stage], waking=lambda waited: 1.0 + waited)
    assert ends(played) == [[1, 2], [6, 10]]
    assert played.alone[graph.lines[1][0]] == 5


def test_a_message_waits_for_the_one_that_was_sent_before_it() -> None:
    """A message keeps the link busy for 3 of the 5 seconds that it takes; the second is computed after 2 seconds."""
    played = Engine(Graph(TWO_STAGES), lambda _: 1.0, lambda *_: (5.0, 3.0))
    assert ends(played) == [[1.0, 2.0], [7.0, 10.0]]


def test_messages_of_different_workers_do_not_wait_for_each_other() -> None:
    """Gradients go back, and activations on, at the same time."""
    programs = [[Forward(0, 0), Forward(0, 1), Backward(0, 0)], [Forward(1, 0), Backward(1, 0), Forward(1, 1)]]
    played = Engine(Graph(programs), lambda _: 1.0, lambda sender, receiver: (5.0, 100.0 * (sender < receiver)))
    assert ends(played) == [[1, 2, 14], [7, 8, 107]]


def test_the_order_of_a_worker_is_asked_for() -> None:
    graph = Graph(TWO_STAGES)
    played = Engine(graph, lambda _: 1.0, order=InOrder(graph, [[1, 0], [3, 2]]))
    assert played.begun == [1, 0, 3, 2]
    assert ends(played) == [[2, 1], [3, 2]]


def test_what_cannot_start_never_does() -> None:
    programs = [[Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1)], [*TWO_STAGES[1], Backward(1, 0)]]
    programs[1].append(Backward(1, 1))
    played = Engine(Graph(programs), lambda _: 1.0)
    assert [graph_start < float("inf") for graph_start in played.starts] == [True] + [False] * 3 + [True] + [False] * 3
