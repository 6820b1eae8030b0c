"""Ranks that hang for real, and what they find out about it from each other's notices."""

from typing import Any

import torch
import torch.distributed as dist
from support.processes import free_port, join, run_ranks

from distlab.comm.context import Options, Transport
from distlab.comm.group import empty, shares
from distlab.comm.waits import TrafficError
from distlab.rendezvous.groups import world_group


def wait_in_another_order(rank: int, port: int, transport: Transport) -> tuple[bool, str]:
    """Rank 0 waits for an all-reduce before it sends; rank 1 receives before it waits for the all-reduce."""
    join(rank, 2, port, timeout_seconds=3, options=Options(transport=transport))
    world = world_group()
    assert world is not None
    assert world.notices is not None
    buffer, message = empty(1000, torch.empty(0)), torch.zeros(5)
    is_shared = shares(buffer)
    begun: Any = dist.all_reduce(buffer, async_op=True)
    try:
        if rank == 1:
            dist.recv(message, 0)
        begun.wait()
        if rank == 0:
            dist.send(message, 1)
    except TrafficError as error:
        found = world.notices.explain(error)
        world.notices.keep_store_open()
        return is_shared, found.sentence if found else ""
    dist.barrier()
    return is_shared, ""


def test_a_deadlock_is_named_that_only_shared_memory_has() -> None:
    """There an all-reduce goes on only while all ranks wait for it."""
    named = "deadlock: rank 0 waits for rank 1, which waits for rank 0"
    assert run_ranks(2, wait_in_another_order, free_port(), "shared") == [(True, named)] * 2
    assert run_ranks(2, wait_in_another_order, free_port(), "gloo") == [(False, "")] * 2
