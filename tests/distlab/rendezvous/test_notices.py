"""Ranks that hang for real, and what they find out about it from each other's notices."""

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, run_ranks

from distlab.comm.traffic import Transport, traffic
from distlab.comm.waits import TrafficError
from distlab.rendezvous.notices import notices
from distlab.rendezvous.ranks import open_store

pytestmark = pytest.mark.waits


def wait_in_another_order(rank: int, port: int, transport: Transport) -> tuple[bool, str]:
    """Rank 0 waits for an all-reduce before it sends; rank 1 receives before it waits for the all-reduce."""
    store = open_store(rank, "localhost", port, 30, lambda _: None)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    traffic.timeout_seconds, traffic.transport = 3, transport
    notices.open(store, rank, 2, traffic, is_rank_0s=True)
    buffer, message = traffic.new_buffer(1000, torch.empty(0)), torch.zeros(5)
    is_shared = traffic.is_shared(buffer)
    begun = traffic.all_reduce(buffer, "the gradients", kind="gradients")
    try:
        if rank == 1:
            traffic.receive(message, "the result", source=0).wait()
        begun.wait()
        if rank == 0:
            traffic.send(message, "the result", to=1, kind="results").wait()
    except TrafficError as error:
        found = notices.explain(error)
        notices.keep_store_open()
        return is_shared, found.sentence if found else ""
    dist.barrier()
    return is_shared, ""


def test_a_deadlock_is_named_that_only_shared_memory_has() -> None:
    """There an all-reduce goes on only while all ranks wait for it."""
    named = "deadlock: rank 0 waits for rank 1, which waits for rank 0"
    assert run_ranks(2, wait_in_another_order, free_port(), "shared") == [(True, named)] * 2
    assert run_ranks(2, wait_in_another_order, free_port(), "gloo") == [(False, "")] * 2
