"""Simulated schedules: times, bubbles and bytes by formula and by hand; broken schedules, each with its sentence."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipeline_models import passes, programs_from

from distlab.pipeline.actions import (
    ACTIVATIONS,
    GRADIENTS,
    GRAPH,
    Action,
    ActionCosts,
    Backward,
    Forward,
    Program,
    Result,
)
from distlab.pipeline.engine import LinkKey, ScheduleError
from distlab.pipeline.plan import (
    MULTIPLY_ADDS_OF_A_THREAD,
    busy_workers,
    ideal_bubble,
    in_a_row,
    most_on_the_way,
    simulate,
    threads_by_plan,
)
from distlab.pipeline.schedules import all_stages
from distlab.pipeline.split import estimated_costs, multiply_adds

pytestmark = pytest.mark.quick

SIZES = [(1, 1), (1, 4), (2, 1), (2, 5), (3, 3), (3, 8), (5, 2), (4, 12)]


def results(stage: int, text: str) -> list[Result]:
    """What "F0 B0" on a stage send to others."""
    return [action.result(ACTIVATIONS if isinstance(action, Forward) else GRADIENTS) for action in passes(stage, text)]


@pytest.mark.parametrize("name", ["gpipe", "dapple"])
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0), (2.0, 7.0)])
def test_bubble_by_the_formula(name: str, stages: int, micro_batches: int, forward: float, backward: float) -> None:
    plan = simulate(all_stages(name, stages, micro_batches), ActionCosts(forward, backward))
    bubble = (stages - 1) / (micro_batches + stages - 1)
    assert plan.makespan == pytest.approx((micro_batches + stages - 1) * (forward + backward))
    assert plan.bubble == pytest.approx([bubble] * stages)
    assert ideal_bubble(stages, micro_batches) == pytest.approx(bubble)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_peaks_and_traffic(stages: int, micro_batches: int) -> None:
    live = {
        "naive": [1] * stages,
        "gpipe": [micro_batches] * stages,
        "dapple": [min(stages - stage, micro_batches) for stage in range(stages)],
    }
    sizes = [10.0 * (stage + 1) for stage in range(stages)]
    links = [(stage > 0) + (stage < stages - 1) for stage in range(stages)]
    for name in live:
        plan = simulate(all_stages(name, stages, micro_batches), ActionCosts(activation_bytes=sizes))
        assert plan.peak_live == live[name]
        assert plan.peak_bytes == [count * size for count, size in zip(live[name], sizes, strict=True)]
        sent = [sum(len(found) for link, found in plan.messages.items() if link[0] == s) for s in range(stages)]
        assert sent == [micro_batches * count for count in links]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_messages_delay_a_step_by_their_way_there_and_back(stages: int, micro_batches: int) -> None:
    ways = 2 * (stages - 1) * 0.5
    naive, gpipe = (
        simulate(all_stages(name, stages, micro_batches), ActionCosts(1.0, 2.0, transfer=0.5))
        for name in ("naive", "gpipe")
    )
    assert naive.makespan == micro_batches * (3.0 * stages + ways)
    assert gpipe.makespan == 3.0 * (micro_batches + stages - 1) + ways
    assert naive.bubble == pytest.approx([1 - 3.0 * micro_batches / naive.makespan] * stages)


def test_unequal_stages_and_a_slow_link_by_hand() -> None:
    plan = simulate(all_stages("gpipe", 2, 2), ActionCosts(forward=[1.0, 3.0], backward=[2.0, 4.0], transfer=1.0))
    assert [[(str(span.action), span.start, span.end) for span in line] for line in plan.spans] == [
        [("F0", 0, 1), ("F1", 1, 2), ("B0", 13, 15), ("B1", 17, 19)],
        [("F0", 2, 5), ("F1", 5, 8), ("B0", 8, 12), ("B1", 12, 16)],
    ]
    assert plan.makespan == 19
    assert plan.bubble == pytest.approx([13 / 19, 5 / 19])
    assert plan.messages == {(0, 1, ACTIVATIONS): results(0, "F0 F1"), (1, 0, GRADIENTS): results(1, "B0 B1")}
    busy = [{str(span.action): busy_workers(plan)[span.action] for span in line} for line in plan.spans]
    assert busy == [{"F0": 1, "F1": 1, "B0": 2, "B1": 1}, {"F0": 1, "F1": 1, "B0": 1, "B1": 2}]
    at_once = simulate(all_stages("gpipe", 1, 2), ActionCosts(forward=0.0, backward=1.0))
    assert {*busy_workers(at_once).values()} == {1}, "also of passes that take no time"


def threads(workers: int, cores: int, costs: ActionCosts | None) -> list[str]:
    """The actions of GPipe with 5 micro-batches that have more than one thread, by worker."""
    programs = all_stages("gpipe", workers, 5)
    found = threads_by_plan(programs, cores, costs)
    return [" ".join(str(action) for action in program if found[action] > 1) for program in programs]


def test_an_action_gets_the_cores_of_workers_that_are_idle_by_the_costs_if_there_are_enough_cores() -> None:
    heavy = ActionCosts(forward=[1.0, 3.0], backward=[2.0, 6.0])
    assert threads(2, 2, None) == ["F0 B4", "F4 B0"]
    assert threads(2, 2, heavy) == ["F0 B4", "F2 F3 F4 B0"]
    heavy = ActionCosts(forward=[1.0, 1.0, 3.0], backward=[2.0, 2.0, 6.0])
    assert threads(3, 2, heavy) == threads(3, 2, None) != threads(3, 3, heavy)


@pytest.mark.parametrize(("work", "most"), [(0.5, 1), (1.9, 1), (2, 2), (3.5, 3), (math.inf, 8)])
def test_a_worker_takes_no_more_threads_than_have_enough_to_do_unless_it_is_alone(work: float, most: int) -> None:
    costs = ActionCosts(layer_multiply_adds=work * MULTIPLY_ADDS_OF_A_THREAD)
    assert max(threads_by_plan(all_stages("gpipe", 2, 5), 8, costs).values()) == most
    assert set(threads_by_plan(all_stages("gpipe", 1, 5), 8, costs).values()) == {8}


def test_estimated_costs_are_those_of_layers_embedding_and_head_and_of_blocks_computed_again() -> None:
    parts = multiply_adds(vocab_size=100, dmodel=4, seq_len=8, hidden_dim=10, kv_width=2)
    layer = 2 * 4 * 4 + 2 * 4 * 2 + 3 * 4 * 10 + 4 * 8
    costs = estimated_costs((2, 1), parts)
    assert (costs.forward, costs.backward) == ([2 * layer + 4, layer + 400], [4 * layer + 8, 2 * layer + 800])
    work = [estimated_costs((2, 1), parts, tokens=5, tp=tp).layer_multiply_adds for tp in (1, 2)]
    assert [costs.layer_multiply_adds, *work] == [math.inf, 5 * layer, 5 * layer / 2]
    again = estimated_costs((2, 1), parts, blocks_again=True)
    assert (again.forward, again.backward) == (costs.forward, [6 * layer + 8, 3 * layer + 800])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the schedule has no workers; give at least 1 stage"),
        ("F0 B0 |", "worker 1 has no actions; give every worker a stage and micro-batches"),
        ("F0 B0 | 0: F1 B1", "stage 0 is run by workers 0 and 1; give it to one worker"),
        ("F0 B0 F-1 B-1", "stage 0 runs F-1; stages and micro-batches are numbered from 0"),
        ("F0 F1 B0", "stage 0 never computes the gradients of weights of micro-batch 1"),
        ("F0 I0", "stage 0 never computes the gradients of weights of micro-batch 0"),
        ("F0 B0 B1", "stage 0 never computes the graph of micro-batch 1, which B1 of stage 0 needs"),
        ("F0 B0 | F0", "stage 1 never computes the gradients of micro-batch 0, which B0 of stage 0 needs"),
        ("F0 I0 W0 | F0 W0", "stage 1 never computes the gradients of micro-batch 0, which I0 of stage 0 needs"),
        ("F0 B0 | 2: F0 B0", "stage 1 never computes the gradients of micro-batch 0, which B0 of stage 0 needs"),
        ("F0 F1 B0 B1 | F0 B0", "stage 1 never computes the gradients of micro-batch 1, which B1 of stage 0 needs"),
        ("F0 W0 I0", "stage 0 runs W0 before I0"),
        ("F0 B1 F1 B0", "stage 0 runs B1 before F1"),
        ("F0 B0 B0", "stage 0 runs B0 twice; every action runs once"),
        ("F0 I0 W0 W0", "stage 0 runs W0 twice; every action runs once"),
        ("F0 B0 W0", "stage 0 computes the gradients of weights of micro-batch 0 twice, in B0 and in W0"),
        (
            "F0 F1 B0 B1 | F1 F0 B0 B1",
            "stage 0 sends the activations of micro-batch 0 where worker 1 expects "
            "the activations of micro-batch 1; both ends of a link must agree on the order",
        ),
        (
            "F0 F1 B1 B0 | F0 F1 B0 B1",
            "stage 1 sends the gradients of micro-batch 0 where worker 0 expects "
            "the gradients of micro-batch 1; both ends of a link must agree on the order",
        ),
        (
            "F0 B0 F1 B1 | F0 F1 B0 B1",
            "deadlock: stage 0, before B0, waits for the gradients of micro-batch 0 from stage 1; "
            "stage 1, before F1, waits for the activations of micro-batch 1 from stage 0",
        ),
        (
            "F0 F1 B0 B1 | F0 B0 F1 B1 | F0 F1 B0 B1",
            "deadlock: stage 1, before B0, waits for the gradients of micro-batch 0 from stage 2; "
            "stage 2, before F1, waits for the activations of micro-batch 1 from stage 1",
        ),
        ("1: F0 B0 0: F0 B0", "deadlock: stage 1, before F0, waits for the activations of micro-batch 0 from stage 0"),
    ],
)
def test_a_broken_schedule_is_refused_with_its_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(sentence)}$"):
        simulate(programs_from(text))


def drop(random: Random, program: list[Action]) -> None:
    """Leave an action out."""
    program.pop(random.randrange(len(program)))


def repeat(random: Random, program: list[Action]) -> None:
    """Do an action once more, somewhere."""
    program.insert(random.randint(0, len(program)), random.choice(program))


def go_back_too_early(random: Random, program: list[Action]) -> None:
    """Move a backward pass to just before its forward pass."""
    backward = random.choice([action for action in program if isinstance(action, Backward)])
    program.remove(backward)
    program.insert(program.index(Forward(backward.stage, backward.micro_batch)), backward)


def any_schedule(random: Random) -> list[list[Action]]:
    """What stages do that take whatever is ready, each kind of pass in one order on all of them."""
    stages, micro_batches = random.randint(1, 5), random.randint(1, 6)
    orders = [(kind, random.sample(range(micro_batches), micro_batches)) for kind in (Forward, Backward)]
    todo = [[kind(stage, k) for k in order] for stage in range(stages) for kind, order in orders]
    programs: list[list[Action]] = [[] for _ in range(stages)]
    done: set[Result] = set()
    while any(todo):
        line = random.choice([line for line in todo if line and done.issuperset(line[0].needs(stages))])
        programs[line[0].stage].append(line[0])
        done.update(line.pop(0).results)
    return programs


@settings(derandomize=True, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([0.0, 0.5]))
def test_every_action_of_any_valid_schedule_starts_as_early_as_it_can(random: Random, transfer: float) -> None:
    programs = any_schedule(random)
    plan = simulate(programs, ActionCosts(transfer=transfer))
    assert [[span.action for span in line] for line in plan.spans] == programs
    ended = {result: span.end for line in plan.spans for span in line for result in span.action.results}
    for line in plan.spans:
        free = 0.0
        for span in line:
            sources = span.action.needs(len(programs))
            arrivals = [ended[s] + transfer * (s.stage != span.action.stage) for s in sources]
            assert span.start == max([free, *arrivals])
            free = span.end


@settings(derandomize=True, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([drop, repeat, go_back_too_early]))
def test_no_mutation_of_a_valid_schedule_passes(random: Random, mutate: Callable[[Random, list[Action]], None]) -> None:
    programs = any_schedule(random)
    simulate(programs)
    stage = random.randrange(len(programs))
    mutate(random, programs[stage])
    with pytest.raises(ScheduleError, match=rf"\bstage {stage}\b"):
        simulate(programs)


class Peek(Action):
    """Looks at a result of another stage."""

    letter = "P"
    needed = GRAPH

    def needs(self, stages: int) -> list[Result]:
        return [self.result(self.needed, stage=0)]

    def seconds(self, costs: ActionCosts) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("needed", "sentence"),
    [
        (GRAPH, "P0 of stage 1 needs the graph of micro-batch 0, which stays on stage 0"),
        (ACTIVATIONS, "stage 1 needs the activations of micro-batch 0 for F0 and for P0, but it is sent only once"),
    ],
)
def test_what_stays_on_its_stage_or_is_sent_to_another_action_cannot_be_needed(
    needed: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Peek, "needed", needed)
    programs = [passes(0, "F0 B0"), [Forward(1, 0), Peek(1, 0), Backward(1, 0)]]
    with pytest.raises(ScheduleError, match=sentence):
        simulate(programs)


def play_at_random(programs: Sequence[Program], random: Random) -> Counter[LinkKey]:
    """Run three steps in a random order that the schedule allows; by link, the most messages sent and not taken."""
    programs = in_a_row(programs, 3)
    plan = simulate(programs)
    link_of = {result: link for link, results in plan.messages.items() for result in results}
    done: set[Result] = set()
    on_the_way, most, places = Counter[LinkKey](), Counter[LinkKey](), [0] * len(programs)
    order = list(range(len(programs)))
    while unfinished := [worker for worker in order if places[worker] < len(programs[worker])]:
        if random.random() < 0.05:
            random.shuffle(order)  # the first ones run as far as they can, so that the others are far behind
        for worker in unfinished:
            action = programs[worker][places[worker]]
            needs = action.needs(len(plan.owners))
            if done.issuperset(needs):
                on_the_way.subtract(link_of[result] for result in needs if result in link_of)
                on_the_way.update(link_of[result] for result in action.results if result in link_of)
                most |= on_the_way
                done.update(action.results)
                places[worker] += 1
                break
    return most


@pytest.mark.parametrize("name", ["gpipe", "dapple", "interleaved", "zb-h2", "zb-v"])
@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 4), (3, 6), (4, 8)])
def test_no_more_messages_are_ever_on_the_way_than_there_is_room_for(
    name: str, workers: int, micro_batches: int
) -> None:
    programs = all_stages(name, workers, micro_batches)
    room, most = most_on_the_way(programs, simulate(programs)), Counter[LinkKey]()
    for seed in range(20):
        most |= play_at_random(programs, Random(seed))
    assert set(most) == set(room)
    assert all(most[link] <= room[link] for link in room)
    # Some more: that a message was received may also be seen from what a third worker sends, which is not counted.
    assert sum(room.values()) <= 1.7 * sum(most.values())
    assert max(room.values()) <= {"gpipe": micro_batches}.get(name, 3 * workers)
