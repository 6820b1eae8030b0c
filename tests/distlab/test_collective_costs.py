"""The cost model: predictions are the formulas where formulas exist, and costs are fitted on real ranks."""

import math

import pytest
import torch.distributed as dist
from processes import free_port, process_group, run_ranks

from distlab.collective_costs import LIBRARY, Costs, fit_costs, measure, operations, predict
from distlab.collectives import COMBINE
from distlab.simulation import Link

SIZE_BYTES = 4_000_000
COSTS = Costs(Link(0.001, 1e9), math.inf, 4e9)  # of this size: a message takes 5 ms, an addition 1 ms
MESSAGE, ADDITION, LATENCY = 0.005, 0.001, 0.001


@pytest.mark.parametrize(
    ("operation", "topology", "seconds"),
    [
        ("broadcast", "naive", 7 * MESSAGE),
        ("broadcast", "tree", 3 * MESSAGE),
        ("reduce", "naive", 7 * (MESSAGE + ADDITION)),
        ("reduce", "tree", 3 * (MESSAGE + ADDITION)),
        ("all-reduce", "butterfly", 3 * (2 * MESSAGE + ADDITION)),  # in each round one gives first, then the other
        ("all-reduce", "ring", 7 * (LATENCY + 0.0005 + ADDITION / 8) + 7 * (LATENCY + 0.0005)),
        ("gather", "naive", 7 * (LATENCY + 0.0005)),
        ("gather", "tree", 3 * LATENCY + (1 + 2 + 4) * 0.0005),
    ],
)
def test_predictions_are_the_formulas(operation: str, topology: str, seconds: float) -> None:
    original = dict(COMBINE)
    assert predict(operation, topology, SIZE_BYTES, 8, COSTS).makespan == pytest.approx(seconds)
    assert original == COMBINE


def test_messages_at_the_same_time_share_what_the_computer_moves() -> None:
    shared = Costs(Link(0, 1e9), 2e9, math.inf)
    # The tree's rounds have one, two and four messages: the first two go at full speed, the last four at half of it.
    assert predict("broadcast", "tree", SIZE_BYTES, 8, shared).makespan == pytest.approx(0.004 * (1 + 1 + 2))
    assert predict("broadcast", "naive", SIZE_BYTES, 8, shared).makespan == pytest.approx(0.004 * 7)
    latency = Costs(Link(0.001, 1e9), 2e9, math.inf)
    assert predict("broadcast", "tree", SIZE_BYTES, 8, latency).makespan == pytest.approx(0.005 * (1 + 1 + 2))


def fit_on_gloo(rank: int, size: int, port: int) -> tuple[Costs, dict[str, list[str]]]:
    with process_group(rank, size, port):
        costs = fit_costs(rounds=3)
        for topologies in operations(10_000).values():
            for work in topologies.values():
                assert measure(work, rounds=1) > 0
        dist.barrier()
        return costs, {operation: list(topologies) for operation, topologies in operations(0).items()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_costs_are_fitted_and_everything_runs_on_gloo(size: int) -> None:
    for costs, names in run_ranks(size, fit_on_gloo, size, free_port()):
        assert costs.combined_bytes_per_second > 0
        if size > 1:
            assert 0 < costs.link.latency_seconds < 1
            assert 1e6 < costs.link.bytes_per_second < 1e12
            assert 1e6 < costs.shared_bytes_per_second < 1e12
        assert all(topologies[-1] == LIBRARY for topologies in names.values())
        assert names["all-reduce"] == ["naive", "tree", "butterfly", "ring", LIBRARY]
