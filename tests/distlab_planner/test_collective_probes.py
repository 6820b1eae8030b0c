"""The numbers of the cost model are measured on real ranks."""

import math
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support.processes import free_port, process_group, run_ranks

from distlab.collectives.simulation import Link, SimulatedWorld
from distlab_planner.collective_model import LIBRARY, CostModel, operations, simulate_collective
from distlab_planner.collective_probes import (
    ADDED_BYTES,
    FITTED_BYTES,
    Probes,
    costs_for,
    fit_costs,
    measure,
    seconds_in_turn,
)


def test_one_rank_adds_and_copies_while_the_others_do_nothing() -> None:
    for rank in range(3):
        endpoint: Any = SimpleNamespace(get_rank=lambda rank=rank: rank, get_world_size=lambda: 3)
        works = Probes(message_bytes=64, tensor_bytes=64).works(endpoint, device="meta")
        assert (works["adding"] is works["all_adding"]) == (rank == 0)
        assert (works["adding"] is works["copying"]) == (rank > 0)


def two_in_turn(rank: int, size: int, port: int) -> tuple[list[str], dict[str, list[float]]]:
    with process_group(rank, size, port):
        calls: list[str] = []

        def nap() -> None:
            calls.append("nap")
            time.sleep(0.05)

        return calls, seconds_in_turn({"nap": nap, "b": partial(calls.append, "b")}, rounds=2, in_a_row=5)


def test_what_is_compared_runs_in_turn() -> None:
    outcomes = run_ranks(2, two_in_turn, 2, free_port())
    for calls, seconds in outcomes:
        assert calls == [*5 * ["nap"], *10 * ["b"], *10 * ["nap"], *5 * ["b"]]
        assert 0.05 <= min(seconds["nap"]) < 0.2, "of one of five in a row, not 0.25"
        assert [len(of_one) for of_one in seconds.values()] == [2, 2]
        assert seconds == outcomes[0][1], "the slowest rank's, on all ranks"


def fit_on_gloo(rank: int, size: int, port: int) -> tuple[dict[int, CostModel], dict[str, list[str]]]:
    with process_group(rank, size, port):
        fitted = fit_costs(rounds=3)
        for topologies in operations(10_000).values():
            for work in topologies.values():
                assert measure(work, rounds=1) > 0
        dist.barrier()
        return fitted, {operation: list(topologies) for operation, topologies in operations(0).items()}


@pytest.mark.parametrize("size", [1, 3])
def test_costs_are_fitted_and_everything_runs_on_gloo(size: int) -> None:
    for fitted, names in run_ranks(size, fit_on_gloo, size, free_port()):
        assert list(fitted) == list(FITTED_BYTES)
        for costs in fitted.values():
            assert 1e6 < costs.combined_bytes_per_second < 1e12
            assert 1e6 < costs.copied_bytes_per_second < 1e12
            if size > 1:
                assert 0 < costs.link.latency_seconds < 1
                assert 1e6 < costs.link.bytes_per_second < 1e12
                assert 1e6 < costs.shared_bytes_per_second < 1e12
        assert all(topologies[-1] == LIBRARY for topologies in names.values())
        assert names["all-reduce"] == ["naive", "tree", "butterfly", "ring", LIBRARY]


@pytest.mark.parametrize(("message_bytes", "fitted_bytes"), [(0, 1), (4, 4), (7, 4), (9, 16), (1000, 16)])
def test_a_message_costs_what_those_cost_that_are_most_alike(message_bytes: int, fitted_bytes: int) -> None:
    fitted = {size: CostModel(Link(), math.inf, size) for size in (1, 4, 16)}
    assert costs_for(message_bytes, fitted) is fitted[fitted_bytes]


def test_what_the_probes_send() -> None:
    probes = Probes(message_bytes=4_000, tensor_bytes=10_000)
    counts = {}
    for name in ("tiny", "alone", "together"):
        world = SimulatedWorld(3)
        world.run(lambda endpoint: probes.works(endpoint)[name]())  # noqa: B023
        counts[name] = [(rank.sends, rank.sent_bytes) for rank in world.counts]
    assert counts == {
        "tiny": [(1, 4), (1, 4), (0, 0)],
        "alone": [(1, 4_000), (1, 4_000), (0, 0)],
        "together": [(2, 8_000)] * 3,
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_costs_of_a_simulated_world_are_found_again(size: int) -> None:
    ranks_at_once = math.inf if size == 1 else 2
    link, shared = (Link(), math.inf) if size == 1 else (Link(0.001, 1e9), 1.5e9)
    costs = CostModel(link, shared, 4e9, 3e9, ranks_at_once)
    probes = Probes(message_bytes=1_000_000, tensor_bytes=3_500_000)
    names = SimulatedWorld(size).run(lambda endpoint: list(probes.works(endpoint, "meta")))[0]
    seconds = {
        name: [simulate_collective(lambda endpoint: probes.works(endpoint, "meta")[name], size, costs).makespan] * 3  # noqa: B023
        for name in names
    }
    found = probes.costs(seconds, size)
    assert found.link.latency_seconds == pytest.approx(link.latency_seconds, rel=1e-4)
    assert found.link.bytes_per_second == pytest.approx(link.bytes_per_second, rel=1e-4)
    assert found.shared_bytes_per_second == pytest.approx(shared, rel=1e-4)
    assert found.combined_bytes_per_second == pytest.approx(4e9)
    assert found.copied_bytes_per_second == pytest.approx(3e9)
    assert found.ranks_at_once == pytest.approx(ranks_at_once)


def test_costs_follow_from_the_seconds_of_the_probes() -> None:
    seconds = {
        "tiny": [0.001, 9, 0.002],
        "alone": [9, 0.009, 0.010],
        "together": [0.070, 9, 0.080],
        "adding": [0.050],
        "all_adding": [0.120, 0.080],
        "copying": [0.004],
    }
    costs = Probes(4_000_000, 18_000_000).costs(seconds, world_size=4)
    # A message of 4 MB takes 5 ms, 1 ms of which is its latency; four from each of four, with theirs, take 80 ms.
    assert costs.link.latency_seconds == pytest.approx(0.001)
    assert costs.link.bytes_per_second == pytest.approx(1e9)
    assert costs.shared_bytes_per_second == pytest.approx(4 * 5_000_000 / 0.020)
    assert costs.combined_bytes_per_second == pytest.approx(ADDED_BYTES / 0.050)
    assert costs.copied_bytes_per_second == pytest.approx(4e9)
    assert costs.ranks_at_once == pytest.approx(2), "four that add at the same time take twice as long as one"
    seconds |= {"tiny": [0.5], "all_adding": [0.5]}  # disturbed: latency is part of a message, and one rank can add
    costs = Probes(4_000_000, 18_000_000).costs(seconds, world_size=4)
    assert (costs.link.latency_seconds, costs.ranks_at_once) == (pytest.approx(0.0025), 1)
