"""The step that the planner plays, where it can be compared: with the simulation of a schedule, and by hand."""

from collections import Counter
from dataclasses import replace

import pytest
from planner_machines import CLUSTER, MODEL, SIZES, cluster

from distlab.comm.link import Link
from distlab.pipeline.actions import ActionCosts, Forward, stages_of
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import SCHEDULES, stages_per_worker
from distlab.planner.costs import Costs
from distlab.planner.layouts import Layout, default_split
from distlab.planner.machine import Machine, Measured, PassSeconds
from distlab.planner.model import NUMBER_BYTES
from distlab.planner.step import Hosts, Work, least_seconds, play, predict, sent_bytes

NAMES = [name for name in SCHEDULES if name != "auto"]


def layout(schedule: str = "dapple", pp: int = 2, micro_batches: int = 4, dp: int = 1, tp: int = 1) -> Layout:
    split = default_split(MODEL, pp * stages_per_worker(schedule))
    return Layout(dp, pp, tp, micro_batches, micro_batches, schedule, "none", "none", split)


@pytest.mark.parametrize("name", NAMES)
def test_with_cores_for_all_it_is_the_simulation_of_the_schedule(name: str) -> None:
    costs = Costs(cluster(pass_seconds=1e-6, inside=Link(3e-6)), MODEL, layout(name))
    programs = costs.layout.programs()
    known = {(a.letter, a.stage): costs.seconds(a) for program in programs for a in program}
    plan = simulate(programs, ActionCosts(measured=known, transfer=3e-6))
    step = predict(costs)
    loss = costs.placement.all_reduce(costs.placement.slices, 8).seconds + 2 * 3e-6
    assert step.seconds == pytest.approx(plan.makespan + loss)
    assert step.bubble == pytest.approx(sum(plan.bubble) / 2)


@pytest.mark.parametrize("name", NAMES)
def test_playing_with_and_without_disturbance_is_the_same_where_there_is_none(name: str) -> None:
    for recompute in ("none", "all"):
        own = replace(layout(name, tp=2, dp=2), recompute=recompute)  # type: ignore[arg-type]
        machine = cluster(pass_seconds=1e-6, optimizer_seconds=1e-9, inside=Link(3e-6, 1e9))
        quick, slow = (predict(Costs(one, MODEL, own)) for one in (machine, replace(machine, slowdown=(1.0,))))
        assert vars(quick) == pytest.approx(vars(slow), abs=1e-12)


def test_ranks_beyond_the_cores_share_them() -> None:
    two_cores = cluster(cores_per_host=2, device="cpu")
    one, two, four = (predict(Costs(two_cores, MODEL, layout(pp=1, dp=dp))).seconds for dp in (1, 2, 4))
    assert one < two < four
    assert predict(Costs(two_cores, MODEL, layout(pp=1, dp=4))).sharing > 0
    assert predict(Costs(two_cores, MODEL, layout(pp=1, dp=2))).sharing == pytest.approx(0)


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


def test_threads_that_were_asked_for_are_those_of_every_action() -> None:
    machine = cluster(cores_per_host=2, device="cpu")
    alone = Costs(machine, MODEL, layout(pp=1))
    one, two = (predict(replace(alone, threads=threads)) for threads in (1, 2))
    assert one.computing == pytest.approx(2 * two.computing)
    assert two.seconds == pytest.approx(predict(alone).seconds)
    assert least_seconds(replace(alone, threads=1)) == pytest.approx(2 * least_seconds(alone), rel=0.1)
    on_gpus = Costs(CLUSTER, MODEL, layout(pp=1))
    assert predict(replace(on_gpus, threads=4)) == predict(on_gpus)


def test_a_message_costs_its_ends_time() -> None:
    """Three stages with a micro-batch: the way there and back has four messages, each with two ends."""
    plain = cluster(slowdown=(1.0,), cores_per_host=8)
    step, slower = (
        predict(Costs(replace(plain, message_seconds=seconds), MODEL, layout("naive", pp=3, micro_batches=1))).seconds
        for seconds in (0.0, 1.0)
    )
    assert slower - step == pytest.approx(8)


@pytest.mark.parametrize("slowdown", [(), (1.0,)], ids=["undisturbed", "disturbed"])
def test_a_pass_takes_longer_if_its_rank_has_waited(slowdown: tuple[float, ...]) -> None:
    """Four of six passes follow a wait: not the first one, and not the backward pass of the last stage."""
    machine = cluster(slowdown=slowdown, cores_per_host=8)
    at_once, later = (
        predict(Costs(replace(machine, waking_seconds=seconds), MODEL, layout("naive", pp=3, micro_batches=1)), 1)
        for seconds in (0.0, 1.0)
    )
    assert later.seconds - at_once.seconds == pytest.approx(4)
    assert later.computing - at_once.computing == pytest.approx(2), "of the stage in the middle"
    assert later.sharing == pytest.approx(at_once.sharing)


def test_a_message_waits_for_the_one_that_was_sent_before_it() -> None:
    """A message keeps the link busy for 3 of the 5 seconds that it takes; the second is computed after 2 seconds."""
    hosts = Hosts([0, 1], [1, 1], lambda busy: 1.0)
    works = [
        [Work(1.0, 1, action, tuple(action.needs(2))) for action in (Forward(stage, 0), Forward(stage, 1))]
        for stage in (0, 1)
    ]
    played = play(works, hosts, lambda *_: 5.0, {0: 0, 1: 1}, carrying=lambda *_: 3.0)
    assert played.ends == [[1.0, 2.0], [7.0, 10.0]]
    # Where messages take much longer than passes, a step of GPipe takes what the link carries: all activations, and
    # then all their gradients.
    slow = Costs(cluster(inside=Link(0.0, 1e3)), MODEL, layout("gpipe", micro_batches=4))
    assert predict(slow).seconds == pytest.approx(2 * 4 * slow.message_bytes / 1e3, rel=0.01)


def test_threads_that_slow_each_other_are_not_slowed_twice() -> None:
    passes = PassSeconds((1.0,), (2.0,), (1.0,), (1.0,))
    none = PassSeconds((0.0,), (0.0,), (0.0,), (0.0,))
    measured = tuple(Measured(SIZES, 1, threads, (1,), none, passes, none) for threads in (1, 2))
    machine = cluster(cores_per_host=2, device="cpu", slowdown=(1.0, 1.5), measured=measured)
    step = predict(Costs(machine, MODEL, layout(pp=1, micro_batches=1)))
    assert step.seconds == pytest.approx(3.0 * MODEL.n_layers)


def test_threads_of_a_rank_that_computes_alone() -> None:
    machine = cluster(cores_per_host=2, device="cpu")
    one = predict(Costs(replace(machine, cores_per_host=1), MODEL, layout(pp=1))).computing
    assert predict(Costs(machine, MODEL, layout(pp=1))).computing == pytest.approx(one / 2)
    assert predict(Costs(replace(machine, device="cuda"), MODEL, layout(pp=1))).computing == pytest.approx(one)


def test_gradients_are_averaged_behind_the_last_backward_pass() -> None:
    slow = cluster(hosts=2, ranks_per_host=1, between=Link(0.0, 1e6))
    costs = Costs(slow, MODEL, layout(pp=1, dp=2))
    step = predict(costs)
    whole = costs.weights(0) * NUMBER_BYTES / 1e6  # a ring of two: each sends half, twice
    assert step.averaging == pytest.approx(whole, rel=1e-3)
    assert step.bound == "averaging gradients"


def test_bytes_are_those_that_the_ledger_counts() -> None:
    costs = Costs(CLUSTER, MODEL, layout(pp=2, dp=2, tp=2))
    [first, last] = sent_bytes(costs)
    message = 16 * 32 * 4
    weights = [costs.weights(stage) * 4 for stage in range(2)]
    blocks = costs.layout.split
    assert first == 4 * message + weights[0] + 4 * (4 * blocks[0] + 1) * message
    assert last == 4 * message + weights[1] + 4 * (4 * blocks[1] + 1) * message


@pytest.mark.parametrize("machine", [CLUSTER, cluster(device="cpu", cores_per_host=2), cluster(pass_seconds=1e-5)])
@pytest.mark.parametrize("name", NAMES)
def test_no_step_is_shorter_than_the_least(name: str, machine: Machine) -> None:
    for recompute in ("none", "blocks", "all"):
        for dp in (1, 2):
            costs = Costs(machine, MODEL, replace(layout(name, dp=dp), recompute=recompute))  # type: ignore[arg-type]
            assert stages_of(costs.layout.programs()[0])
            assert 0 < least_seconds(costs) <= predict(costs).seconds
