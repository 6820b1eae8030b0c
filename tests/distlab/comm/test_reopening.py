"""Groups that are closed and made again, in one process: nothing is left of them."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.held import mappings, pipes_and_memory, threads
from support.processes import free_port, join, leave_group, process_group, run_ranks

from distlab.comm.context import Options, TransportName, context_of
from distlab.comm.group import empty, open_queues

SECONDS_TO_END = 5.0  # for gloo's threads, on busy cores
ROUNDS = 25  # what one of them leaves behind shows after a few


def held() -> tuple[int, int, int, int]:
    """This process's descriptors, in total and without connections, its threads, and mappings shared with others."""
    shared = mappings()
    return len(os.listdir("/proc/self/fd")), pipes_and_memory(), threads(), shared


def use(group: dist.ProcessGroup | None) -> None:
    """Everything that a group makes when it is asked for: slots, memory, queues, connections."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    plain, shared = torch.full((1000,), float(rank)), empty(1000, torch.empty(0), group).fill_(rank)
    for tensor in (plain, shared):
        dist.all_reduce(tensor, group=group)
        assert tensor[-1] == sum(range(size))
    row = dist.get_process_group_ranks(group or dist.group.WORLD)
    open_queues(row, 4000, plain, group)
    if rank > 0:
        dist.recv(plain, group=group, group_src=rank - 1)
    if rank < size - 1:
        dist.send(plain.fill_(rank), group=group, group_dst=rank + 1)
    assert plain[-1] == (rank if rank < size - 1 else rank - 1)


def settled() -> tuple[int, int, int, int]:
    """What is held when gloo's threads have ended, which they do by themselves."""
    now, before = held(), None
    while now != before:
        time.sleep(0.2)
        now, before = held(), now
    return now


def grow(round_trip: Callable[[int], object], warm_up: int, rounds: int) -> None:
    """No more is held after all rounds than after the first few."""
    for number in range(warm_up):
        round_trip(number)
    before = settled()
    for number in range(warm_up, rounds):
        round_trip(number)
    deadline = time.monotonic() + SECONDS_TO_END
    while settled() != before and time.monotonic() < deadline:
        pass
    assert settled() == before


def make_again(rank: int, port: int, transport: TransportName) -> None:
    with process_group(rank, 3, port, options=Options(transport=transport)):

        def round_trip(_: int) -> None:
            group = dist.new_group([0, 2])
            if rank != 1:
                use(group)
                dist.destroy_process_group(group)

        grow(round_trip, 5, ROUNDS)


def begin_again(rank: int, ports: list[int], transport: TransportName) -> None:
    def round_trip(number: int) -> None:
        join(rank, 2, ports[number], options=Options(transport=transport))
        context_of().waits.watch(lambda _: None, torch.device("cpu"))  # in a thread, as over NCCL
        use(None)
        dist.barrier()
        dist.destroy_process_group()

    grow(round_trip, 2, len(ports))


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_nothing_is_left_of_groups_that_are_closed(transport: TransportName) -> None:
    run_ranks(3, make_again, free_port(), transport)


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_one_default_group_follows_another(transport: TransportName) -> None:
    run_ranks(2, begin_again, [free_port() for _ in range(5)], transport)


def begin_twice_with_the_same_options(rank: int) -> None:
    """Both groups go on with the ledger of the first context."""
    first = join(rank, 1, free_port())
    options = Options(previous=first)
    given = replace(options)
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group("lab", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
        assert context_of().ledger is first.ledger
        assert context_of().options.previous is None, "or every earlier context would stay"
        assert options == given


def test_the_options_of_a_group_stay_as_they_are() -> None:
    run_ranks(1, begin_twice_with_the_same_options)


def sum_in_new_groups(store: dist.Store, rank: int, value: float) -> float:
    """Make the groups of a program of two ranks, add up two tensors, close the groups; return an element of the sum."""
    options, limit = Options() if rank else None, timedelta(seconds=10)
    dist.init_process_group("lab", store=store, rank=rank, world_size=2, timeout=limit, pg_options=options)
    assert context_of().waits.timeout_seconds == 10
    tensor = torch.full((1000,), value)
    dist.all_reduce(tensor, group=dist.new_group([0, 1]))
    dist.barrier()
    dist.destroy_process_group()
    return tensor[-1].item()


def make_all_again(rank: int, port: int) -> list[float]:
    """Groups of a program in a store that outlives them, as a launcher's; rank 0 is late each time."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    leave_group()
    store, found = dist.TCPStore("localhost", port, is_master=rank == 0), list[float]()
    for number in range(3):
        time.sleep(0.5 * (rank == 0))
        found.append(sum_in_new_groups(store, rank, number + 1.0))
    return found


def test_a_program_makes_its_groups_again_in_a_store_that_outlives_them() -> None:
    assert run_ranks(2, make_all_again, free_port()) == [[2, 4, 6]] * 2


def make_with_two_others(rank: int, ports: list[int]) -> list[float]:
    """Rank 0 makes groups with one process, and then, in a store of their own, with a process that has made none."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    leave_group()
    found = list[float]()
    for port in ports if rank == 0 else [ports[rank - 1]]:
        store = dist.TCPStore("localhost", port, is_master=rank == 0)
        found.append(sum_in_new_groups(store, min(rank, 1), 1.0))
    return found


def test_a_program_makes_its_groups_again_with_a_process_that_has_made_none() -> None:
    assert run_ranks(3, make_with_two_others, [free_port(), free_port()]) == [[2, 2], [2], [2]]
