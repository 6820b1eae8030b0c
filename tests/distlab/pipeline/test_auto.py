"""The schedule `auto`: not slower than what is written by hand, faster where costs are uneven, within its limit."""

import re
from dataclasses import replace
from random import Random

import pytest

from distlab.pipeline.actions import GRAPH, ActionCosts, BackwardInput, ForwardAgain, Result, stages_of
from distlab.pipeline.auto import RECOMPUTING, Limit, find_programs, placement, read_limit
from distlab.pipeline.plan import Plan, simulate
from distlab.pipeline.schedules import SCHEDULES, all_stages, auto, stages_per_worker, with_recomputation
from simplellm.errors import InputError

WRITTEN = [name for name in SCHEDULES if name not in ("naive", "auto")]
COSTS = {  # of all stages of a worker together: F, B whole, W's share of B, a message; W's share of the activations
    "F = B = W": (1, 2, 0.5, 0, 0.5),
    "B = 1.2, W = 0.8": (1, 2, 0.4, 0, 0.5),
    "cheap W, messages": (1, 2, 0.3, 0.1, 0.6),
    "W keeps all": (1, 2.4, 0.5, 0.05, 1.0),
}


def costs_of(name: str, chunks: int) -> ActionCosts:
    """Those of each stage, where a worker has so many."""
    forward, backward, weight_share, transfer, bytes_share = COSTS[name]
    return ActionCosts(
        forward / chunks,
        backward / chunks,
        transfer,
        activation_bytes=1 / chunks,
        weight_share=weight_share,
        weight_bytes_share=bytes_share,
    )


def by_hand(costs: str, workers: int, micro_batches: int, most_chunks: int) -> list[Plan]:
    """The plans of all schedules that fit, with at most so many stages a worker."""
    names = [name for name in WRITTEN if SCHEDULES[name].fits(workers, micro_batches)]
    programs = [(all_stages(name, workers, micro_batches), stages_per_worker(name)) for name in names]
    return [simulate(lists, costs_of(costs, chunks)) for lists, chunks in programs if chunks <= most_chunks]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("chunks", [1, 2])
def test_at_most_2_percent_slower_than_the_best_that_keeps_as_much(costs: str, chunks: int) -> None:
    """The limit is what the worker keeps that keeps most."""
    sizes = {1: [(2, 8), (3, 5), (4, 4), (4, 7), (6, 9)], 2: [(2, 4), (3, 6), (4, 8)]}
    compared = 0
    for workers, micro_batches in sizes[chunks]:
        plans = by_hand(costs, workers, micro_batches, chunks)
        for limit in {max(plan.peak_bytes) for plan in plans}:
            best = min(plan.makespan for plan in plans if max(plan.peak_bytes) <= limit)
            own = costs_of(costs, chunks)
            found = simulate(find_programs(workers, micro_batches, chunks, own, Limit(limit), tries=60), own)
            assert max(found.peak_bytes) <= limit * (1 + 1e-9)
            assert found.makespan <= 1.02 * best, f"{workers} workers, {micro_batches} micro-batches, limit {limit}"
            compared += 1
    assert compared >= 2 * len(sizes[chunks])


def test_where_the_search_ends_behind_a_written_schedule_that_keeps_no_more_it_is_taken() -> None:
    costs = ActionCosts(0.5, 1, 0.8, activation_bytes=5e6, weight_share=0.3)
    written = all_stages("zb-v", 4, 8)
    by_search = find_programs(4, 8, 2, costs, Limit(4), tries=12)
    assert simulate(by_search, costs).makespan > 1.05 * simulate(written, costs).makespan
    for room, is_taken in ((Limit(4), True), (Limit(40e6, is_bytes=True), True), (Limit(3.9), False)):
        assert (auto(4, 8, 2, costs, room, tries=12) == written) == is_taken
    recomputed = all_stages("auto", 4, 8, 2, replace(costs, input_bytes_share=0.1), Limit(4), recompute=True)
    usual = with_recomputation(written)
    assert simulate(recomputed, costs).makespan <= simulate(usual, costs).makespan


@pytest.mark.parametrize(
    ("workers", "micro_batches", "transfer", "kept"), [(4, 8, 0.0, 4.0), (4, 8, 0.1, 7.0), (8, 16, 0.1, 8.5)]
)
def test_faster_than_all_where_the_last_stage_is_heavy(
    workers: int, micro_batches: int, transfer: float, kept: float
) -> None:
    """It has half of a worker's share more, as with the head of a large vocabulary."""

    def costs_with(chunks: int) -> ActionCosts:
        forward = [1 / chunks] * (workers * chunks - 1) + [1 / chunks + 0.5]
        backward = [2 * seconds for seconds in forward]
        return ActionCosts(forward, backward, transfer, activation_bytes=1 / chunks, weight_share=0.4)

    found = simulate(find_programs(workers, micro_batches, 2, costs_with(2), Limit(kept), tries=60), costs_with(2))
    assert max(found.peak_bytes) <= kept
    for name in WRITTEN:
        chunks = stages_per_worker(name)
        plan = simulate(all_stages(name, workers, micro_batches), costs_with(chunks))
        assert found.makespan < 0.99 * plan.makespan, name


def test_any_costs_and_limits_give_lists_that_run_and_keep_no_more() -> None:
    chance = Random(1)
    for _ in range(60):
        workers, micro_batches, chunks = chance.randint(1, 5), chance.randint(1, 9), chance.randint(1, 2)

        def each(count: int = workers * chunks) -> list[float]:
            return [chance.choice([0.1, 1.0, chance.uniform(0.5, 3)]) for _ in range(count)]

        shares = [chance.uniform(0.1, 0.9) for _ in range(workers * chunks)]
        costs = ActionCosts(each(), each(), chance.choice([0.0, 0.7]), each(), shares, shares)
        limit = Limit(chance.choice([1.0, chance.uniform(1, workers), 2.0 * workers]))
        programs = find_programs(workers, micro_batches, chunks, costs, limit, tries=3)
        assert_recomputed_lists_keep_no_more(workers, micro_batches, chunks, costs, chance)
        plan = simulate(programs, costs)  # complete, every link in order, no deadlock
        assert [stages_of(program) for program in programs] == placement(workers, chunks)
        sizes = costs.activation_bytes
        assert isinstance(sizes, list)
        for program, kept in zip(programs, plan.peak_bytes, strict=True):
            assert kept <= limit.amount * sum(sizes[stage] for stage in stages_of(program)) * (1 + 1e-9)


def assert_recomputed_lists_keep_no_more(
    workers: int, micro_batches: int, chunks: int, costs: ActionCosts, chance: Random
) -> None:
    """Where stages keep their inputs, under a limit in bytes: from the least that will do."""
    sizes = costs.activation_bytes
    assert isinstance(sizes, list)
    costs = replace(costs, input_bytes_share=chance.uniform(0.01, 0.2))
    of_workers = [[sizes[stage] for stage in own] for own in placement(workers, chunks)]
    least = max(max(own) + sum(own) * 0.2 for own in of_workers)
    limit = Limit(least * chance.choice([1.0, chance.uniform(1, 4)]), is_bytes=True)
    programs = with_recomputation(find_programs(workers, micro_batches, chunks, costs, limit, 3, recompute=True))
    assert max(simulate(programs, costs).peak_bytes) <= limit.amount * (1 + 1e-9)


def test_with_recomputation_a_limit_in_bytes_has_room_for_many_inputs_and_r_fills_the_bubble() -> None:
    """A micro-batch keeps 100 bytes, of them 5 for its input."""
    costs = ActionCosts(activation_bytes=100.0, input_bytes_share=0.05)
    makespans = {}
    for limit in (Limit(150, True), Limit(200, True), Limit(4)):
        plan = simulate(with_recomputation(auto(4, 8, 1, costs, limit, tries=12, recompute=True)), costs)
        assert max(plan.peak_bytes) <= (limit.amount if limit.is_bytes else 4 * 100)
        makespans[str(limit)] = plan.makespan
    usual = simulate(all_stages("dapple", 4, 8, recompute=True), costs)
    assert max(makespans.values()) < usual.makespan
    by_name = all_stages("auto", 2, 4, 1, costs, Limit(150, True), recompute=True)
    assert simulate(by_name, costs).makespan < simulate(all_stages("dapple", 2, 4, recompute=True), costs).makespan
    for amount in (105, 150, 199):  # less than two whole micro-batches: one for each stage of a worker
        programs = auto(4, 8, 2, costs, Limit(amount, True), tries=12, recompute=True)
        plan = simulate(with_recomputation(programs), costs)
        assert max(plan.peak_bytes) <= amount * (1 + 1e-9)
    with pytest.raises(InputError, match=re.escape("one micro-batch takes 0.0001 MB on stage 0")):
        all_stages("auto", 4, 8, 1, costs, Limit(90, True), recompute=True)


def test_with_recomputation_a_limit_in_micro_batches_counts_those_of_which_anything_is_kept() -> None:
    """Also those of written schedules, which would be faster than the search."""
    costs = ActionCosts(0.5, 1, activation_bytes=0.5, weight_share=0.3, input_bytes_share=0.1)
    found = auto(2, 4, 2, costs, Limit(1.5), tries=3, recompute=True)
    assert max(simulate(found, costs).peak_bytes) <= 1.5


def test_with_recomputation_a_written_schedule_is_taken_if_it_keeps_to_a_limit_in_bytes_then() -> None:
    costs = ActionCosts(0.5, 1, 0.8, activation_bytes=5e6, input_bytes_share=0.1)
    written = all_stages("zb-h2", 4, 8)
    limit = Limit(max(simulate(with_recomputation(written), costs).peak_bytes), is_bytes=True)
    assert limit.amount < 0.6 * max(simulate(written, costs).peak_bytes)
    for room, is_taken in ((limit, True), (Limit(0.99 * limit.amount, is_bytes=True), False)):
        assert (auto(4, 8, 1, costs, room, tries=3, recompute=True) == written) == is_taken


class FirstHalf(ForwardAgain):
    letter, gives = "x", ("half of a graph",)

    def seconds(self, costs: ActionCosts) -> float:
        return super().seconds(costs) / 2

    def kept_share(self, costs: ActionCosts) -> float:
        return 0.0


class SecondHalf(FirstHalf):
    letter, gives = "y", (GRAPH,)

    def needs(self, stages: int) -> list[Result]:
        return [self.result("half of a graph")]

    def kept_share(self, costs: ActionCosts) -> float:
        return ForwardAgain.kept_share(self, costs)


def test_recomputation_in_two_actions_starts_when_it_would_start_in_one() -> None:
    """In any case early enough for the backward pass after it not to wait."""
    forward, _, weights = RECOMPUTING
    for workers, transfer in ((3, 0.0), (4, 0.3), (4, 1.5)):
        costs = ActionCosts(transfer=transfer, input_bytes_share=0.1)
        whole, halves = (
            find_programs(
                workers, 8, 1, costs, Limit(2.5), tries=12, passes=(forward, (*again, BackwardInput), weights)
            )
            for again in ((ForwardAgain,), (FirstHalf, SecondHalf))
        )
        joined = [
            [
                ForwardAgain(a.stage, a.micro_batch) if type(a) is FirstHalf else a
                for a in program
                if type(a) is not SecondHalf
            ]
            for program in halves
        ]
        assert joined == whole


def test_more_room_is_used_and_bytes_are_the_same_as_micro_batches() -> None:
    costs = ActionCosts(activation_bytes=5e6)
    makespans = [simulate(find_programs(4, 8, 1, costs, Limit(kept), tries=12)).makespan for kept in (1, 2, 4)]
    assert makespans[0] > makespans[1] > makespans[2] == 27
    limits = Limit(2), Limit(10e6, is_bytes=True)
    in_micro_batches, in_bytes = (find_programs(4, 8, 1, costs, limit, tries=3) for limit in limits)
    assert in_micro_batches == in_bytes
    for found in (find_programs(4, 8, 1, costs, tries=12), auto(4, 8, 1, costs, tries=12)):
        assert max(simulate(found, costs).peak_bytes) == 4 * 5e6, "by default, as in DAPPLE"


@pytest.mark.parametrize(
    ("text", "limit"),
    [("6", Limit(6)), ("4.5", Limit(4.5)), ("300kB", Limit(3e5, True)), ("1.5GB", Limit(1.5e9, True))],
)
def test_limits_are_read_and_shown(text: str, limit: Limit) -> None:
    assert read_limit(text) == limit
    assert read_limit(str(limit)) == limit


def test_limits_that_no_worker_can_keep_are_refused() -> None:
    for text in ("", "six", "-1", "6TB", "6 MB", "inf", "0MB"):
        with pytest.raises(
            InputError, match=f"^--keep-at-most {text}: give a number of micro-batches, like 6, or bytes"
        ):
            read_limit(text)
    with pytest.raises(InputError, match=r"^--keep-at-most 0\.5: give at least 1 micro-batch$"):
        read_limit("0.5")
    sentence = "--keep-at-most 9MB: one micro-batch takes 10 MB on stages 0 and 5; give more"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        find_programs(3, 3, 2, ActionCosts(activation_bytes=5e6), Limit(9e6, is_bytes=True))
