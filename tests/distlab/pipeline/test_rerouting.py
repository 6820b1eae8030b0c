"""Schedules in which workers are dead, and others do their work."""

import itertools
import math
from dataclasses import replace

import pytest

from distlab.pipeline.actions import ActionCosts, Backward, BackwardWeight
from distlab.pipeline.engine import ScheduleError
from distlab.pipeline.plan import simulate
from distlab.pipeline.rerouting import hosts_of, reroute, side_by_side
from distlab.pipeline.schedules import all_stages
from distlab.show_schedule import Request, show

COSTS = ActionCosts(forward=1, backward=2)


def without(dead: tuple[int, ...], workers: int) -> list[int]:
    return [worker for worker in range(workers) if worker not in dead]


@pytest.mark.parametrize("name", ["dapple", "zb-h1", "interleaved", "zb-v"])
@pytest.mark.parametrize(("d", "p", "m"), [(2, 3, 3), (3, 2, 4), (3, 4, 4)])
def test_the_living_compute_every_micro_batch(name: str, d: int, p: int, m: int) -> None:
    programs = all_stages(name, p, m)
    dead: list[tuple[int, ...]] = [(worker,) for worker in range(d * p)]
    dead += [pair for pair in itertools.combinations(range(d * p), 2) if pair[0] % p != pair[1] % p][:: d * p]
    ways = [*itertools.product((False, True), (2, math.inf))]
    for number, each in enumerate(dead):
        whole, cores = ways[(number + number // p) % len(ways)]  # another one for the same stage of each pipeline
        rerouted = reroute(programs, d, without(each, d * p), COSTS, whole, cores)
        plan = simulate(rerouted, COSTS, holders=d)  # complete, without a deadlock, links in order
        # A link of interleaved stages may need more room than there is: then there is no limit (see `reroute`).
        most = 3 if name == "interleaved" else 2
        assert max(plan.peak_live) <= most * max(simulate(programs).peak_live)
        for program in rerouted if whole else []:  # sums of gradients grow in the order of the undisturbed run
            for kind, pipeline in itertools.product((Backward, BackwardWeight), range(d)):
                own = [a for a in program if isinstance(a, kind) and a.micro_batch // m == pipeline]
                for stage in {action.stage for action in own}:
                    numbers = [action.micro_batch for action in own if action.stage == stage]
                    assert numbers == [*range(pipeline * m, (pipeline + 1) * m)]


@pytest.mark.parametrize(
    ("d", "p", "m", "healthy", "first", "worst"), [(4, 4, 8, 33, 34, 36), (3, 4, 8, 33, 37, 39), (2, 3, 6, 24, 36, 38)]
)
def test_others_do_the_work_mostly_when_they_would_be_idle(
    d: int, p: int, m: int, healthy: float, first: float, worst: float
) -> None:
    """A dead worker of the first stage, and the worst: of the last stage, whose peers begin p - 1 passes later."""
    programs = all_stages("dapple", p, m)
    assert simulate(side_by_side(programs, d), COSTS, holders=d).makespan == healthy
    times = [
        simulate(reroute(programs, d, without((dead,), d * p), COSTS), COSTS, holders=d).makespan
        for dead in range(d * p)
    ]
    assert (times[0], max(times)) == (first, worst)


@pytest.mark.parametrize("whole", [False, True])
def test_the_work_of_two_dead_workers_of_a_stage_goes_to_different_peers(whole: bool) -> None:
    assert hosts_of(1, 1, 4, [2, 3], whole) == {(0, 0): 2, (0, 1): 3, (0, 2): 2, (0, 3): 3}
    assert hosts_of(1, 1, 4, [1, 3], whole) == {(0, 0): 1, (0, 1): 1, (0, 2): 3, (0, 3): 3}


def test_passes_are_split_where_that_saves_time() -> None:
    programs = all_stages("dapple", 3, 3)

    def letters(cores: float, weight_share: float = 0.5) -> set[str]:
        lists = reroute(programs, 2, without((4,), 6), replace(COSTS, weight_share=weight_share), cores=cores)
        return {action.letter for action in itertools.chain(*lists)}

    assert (letters(2), letters(5)) == ({"F", "B"}, {"F", "I", "W"})
    assert letters(2.37) == letters(5, weight_share=0.01) == {"F", "B"}, "a gain of 1 % is not worth the split"


def test_without_detours_micro_batches_are_missing() -> None:
    left = [program for worker, program in enumerate(side_by_side(all_stages("dapple", 3, 3), 2)) if worker != 4]
    with pytest.raises(ScheduleError, match="stage 1 never computes the gradients of micro-batches 3, 4 and 5,"):
        simulate(left, holders=2)
    three = side_by_side(all_stages("dapple", 1, 3), 3)
    with pytest.raises(ScheduleError, match=r"^stage 0 is run by workers 0, 1 and 2; give it to at most 2$"):
        simulate(three, holders=2)


def test_the_actions_of_guests_are_marked_in_the_table() -> None:
    lines = list(show(Request("dapple", pipelines=2, dead="4")))
    [row] = [line for line in lines if line.startswith("stage 1 of 0")]
    assert {cell for cell in row.split() if "*" in cell} == {f"{letter}{k}*" for letter in "FIW" for k in (3, 4, 5)}
    assert not any(line.startswith("stage 1 of 1") or "*" in line for line in lines if line not in (row, lines[0]))
