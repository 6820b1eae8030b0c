"""The outer optimizer's exchange between replicas, which goes on while they take inner steps."""

import time
from multiprocessing.synchronize import Barrier

import pytest
import torch
import torch.distributed as dist
from support.processes import meeting_of, run_group

from distlab.parallel.options import Compression
from distlab.parallel.outer import FragmentSchedule, OuterOptimizer


def merge_early(rank: int, merged: Barrier, compress: Compression) -> list[float]:
    """The weights after a merge, which rank 0 has done before rank 1 comes to the end of its inner steps."""
    weights = torch.zeros(5000)
    schedule = FragmentSchedule(4, overlap_steps=2)
    outer = OuterOptimizer(weights, schedule, lr=1, momentum=0, merge_alpha=0, compress=compress)
    in_checkpoint = [OuterOptimizer(weights, of).state().keys() for of in (schedule, FragmentSchedule(4))]
    assert in_checkpoint[0] ^ in_checkpoint[1] == {"outer_optimizer.fragment"}, "without overlap, none is under way"
    weights += rank
    dist.barrier()
    outer.send(0)
    if rank == 1:
        merged.wait(20)  # its inner steps take long
    else:
        time.sleep(0.3)
    outer.merge(0)
    if rank == 0:
        merged.wait(20)
    outer.merge(0)  # nothing was sent since
    resumed = OuterOptimizer(weights, schedule, lr=1, momentum=0, merge_alpha=0)
    resumed.load_state(OuterOptimizer(weights, FragmentSchedule(4)).state())
    weights += 1
    resumed.merge(0)  # nothing was sent before the checkpoint of a run without overlap
    ended = weights[::4999].tolist()
    weights += rank
    outer.send(0)
    assert outer.state()["outer_optimizer.fragment"].eq(-1.5).all(), "a checkpoint waits for the fragment under way"
    return ended


@pytest.mark.parametrize("compress", ["none", "bf16"])
def test_a_replica_that_is_early_does_not_wait_for_the_others_inner_steps(compress: Compression) -> None:
    assert run_group(2, merge_early, meeting_of(2), compress, transport="shared") == [[1.5, 1.5]] * 2
