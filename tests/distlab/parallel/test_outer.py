"""The outer optimizer's exchange between replicas, which goes on while they take inner steps."""

import time

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, process_group, run_ranks

from distlab.comm.context import Options
from distlab.parallel.division import Compression
from distlab.parallel.outer import FragmentSchedule, OuterOptimizer

pytestmark = pytest.mark.waits


def merge_early(rank: int, port: int, compress: Compression) -> tuple[float, list[float]]:
    """How long the merge of a fragment takes on rank 0, while rank 1 is at its inner step for long, and the weights."""
    with process_group(rank, 2, port, options=Options(transport="shared")):
        weights = torch.zeros(5000)
        schedule = FragmentSchedule(4, overlap_steps=2)
        outer = OuterOptimizer(weights, schedule, lr=1, momentum=0, merge_alpha=0, compress=compress)
        weights += rank
        dist.barrier()
        outer.send(0)
        time.sleep(0.3 + 2 * rank)  # the inner steps
        started = time.monotonic()
        outer.merge(0)
        return time.monotonic() - started, weights[::4999].tolist()


@pytest.mark.parametrize("compress", ["none", "bf16"])
def test_a_replica_that_is_early_does_not_wait_for_the_others_inner_steps(compress: Compression) -> None:
    (early_seconds, first), (_, second) = run_ranks(2, merge_early, free_port(), compress)
    assert early_seconds < 1.2
    assert first == second == [0.5, 0.5]
