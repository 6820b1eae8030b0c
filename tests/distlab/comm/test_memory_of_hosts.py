"""All-reduces over several hosts: in shared memory on each, over gloo between them. Here a letter names a host."""

import errno
import os
import time
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.operands import combined, operand
from support.processes import assert_told, free_port, join, meeting_of, run_ranks
from support.refusals import refuse
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.context import Context, Options, TransportName
from distlab.comm.group import all_gather_single, empty, reduce_scatter_single, shares
from distlab.comm.names import named
from distlab.comm.waits import TrafficError
from distlab.machine.devices import Place

SIZES = [100_001, 70_000, 300_007]
DTYPES = [torch.float32, torch.bfloat16]
OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX]


def join_hosts(rank: int, hosts: str, port: int, transport: TransportName = "shared", **options: Any) -> Context:
    """Set up the process group of ranks that are on hosts of these names; with "shared", they share any size."""
    places = [Place(host) for host in hosts]
    return join(rank, len(hosts), port, options=Options(transport=transport, places=places, **options))


def promised(hosts: str, elements: int, dtype: torch.dtype, op: ReduceOp.RedOpType) -> Tensor:
    """What the documentation promises: the ranks of each host in their order, then the hosts."""
    operands = [operand(rank, elements, dtype) for rank in range(len(hosts))]
    of_hosts = [
        combined([x for x, its_host in zip(operands, hosts, strict=True) if its_host == host], op)
        for host in dict.fromkeys(hosts)
    ]
    result = combined(of_hosts, op)
    return result / len(hosts) if op == ReduceOp.AVG else result


def reduce_alone(rank: int, port: int) -> tuple[bool, float, set[str]]:
    """Whether ranks that are on a host each share memory, the sum of a buffer, and what it was counted as."""
    context = join_hosts(rank, "ab", port)
    buffer = empty(SIZES[0], torch.empty(0)).fill_(rank + 1)
    with named("the sums", "gradients"):
        dist.all_reduce(buffer)
    return context.shares_memory, buffer[-1].item(), set(context.ledger.sent_bytes)


def test_ranks_on_a_host_each_share_nothing() -> None:
    assert run_ranks(2, reduce_alone, free_port()) == [(False, 3.0, {"gradients"})] * 2


def reduce_all(rank: int, hosts: str, port: int) -> tuple[list[Tensor], dict[str, int]]:
    """All-reduces of all sizes, types and operations, and what was sent for the last type and operation."""
    ledger, size = join_hosts(rank, hosts, port).ledger, len(hosts)
    results = []
    for dtype in DTYPES:
        buffers = [empty(elements, torch.empty(0, dtype=dtype)) for elements in SIZES]
        for op in OPS:
            for buffer in buffers:
                buffer.copy_(operand(rank, len(buffer), dtype))
            ledger.sent_bytes.clear()
            with named("the sums", "gradients"):
                begun = [dist.all_reduce(b, op, async_op=True) for b in buffers]
            for number in (1, 0, 2):  # in another order than that in which they have begun
                begun[number].wait()
            results += [buffer.clone() for buffer in buffers]
    sent_bytes = dict(ledger.sent_bytes)
    own = operand(rank, 100_001, torch.float32)  # of the rank's own memory: over gloo
    dist.all_reduce(own)
    results.append(own)
    parts = empty(2 * size, own).view(size, 2)
    parts[:] = rank
    reduce_scatter_single(parts[rank], parts)
    assert parts[rank].tolist() == [sum(range(size))] * 2
    all_gather_single(parts, parts[rank])
    assert (parts == sum(range(size))).all()
    dist.barrier()
    return results, sent_bytes


@pytest.mark.parametrize("hosts", ["AAB", "ABABB", "ABCA"])
def test_sums_are_those_of_each_hosts_ranks_and_then_of_the_hosts(hosts: str) -> None:
    expected = [promised(hosts, size, dtype, op) for dtype in DTYPES for op in OPS for size in SIZES]
    sum_over_gloo = promised(hosts, 100_001, torch.float32, ReduceOp.SUM)
    by_rank = run_ranks(len(hosts), reduce_all, hosts, free_port())
    for rank, (results, sent_bytes) in enumerate(by_rank):
        assert all(map(torch.equal, results, by_rank[0][0]))
        torch.testing.assert_close(results[-1], sum_over_gloo, rtol=1e-5, atol=1e-4)
        for own, those in zip(results[:-1], expected, strict=True):
            if len(set(hosts)) == 2:
                assert torch.equal(own, those)
            else:  # gloo adds up three hosts in an order of its own
                torch.testing.assert_close(own, those, rtol=1e-5, atol=1e-4 if own.dtype == torch.float32 else 0.1)
        here, size_bytes = hosts.count(hosts[rank]), 2 * sum(SIZES)
        inside, between = 2 * (here - 1) / here * size_bytes, 2 * (len(set(hosts)) - 1) / len(set(hosts)) * size_bytes
        is_first = hosts.index(hosts[rank]) == rank
        assert sent_bytes["gradients"] == pytest.approx(inside, abs=3)
        assert sent_bytes.get("gradients between hosts", 0) == pytest.approx(between * is_first, abs=3)


def exchange_rows(rank: int, hosts: str, port: int) -> dict[str, int]:
    """Each rank sends r rows of 8 bytes to rank r; then one to each."""
    ledger, size = join_hosts(rank, hosts, port).ledger, len(hosts)
    received, numbers = torch.empty(rank * size, 2), list(range(size))
    with named("the rows", "rows"):
        dist.all_to_all_single(received, torch.full((sum(numbers), 2), float(rank)), [rank] * size, numbers)
    assert received[:, 1].tolist() == [source for source in numbers for _ in range(rank)]
    with named("equal parts", "equal"):
        dist.all_to_all_single(torch.empty(size, 2), torch.ones(size, 2))
    pair = dist.new_group([1, 2])
    if rank > 0:
        with named("parts of a pair", "pair"):
            dist.all_to_all_single(torch.empty(2, 2), torch.ones(2, 2), group=pair)
    dist.barrier()
    return dict(ledger.sent_bytes)


def test_rows_that_leave_a_host_are_counted_apart() -> None:
    zero, one, two = run_ranks(3, exchange_rows, "ABA", free_port())
    assert (zero["rows"], zero["rows between hosts"]) == (16, 8)
    assert (zero["equal"], zero["equal between hosts"]) == (8, 8)
    assert (one["rows"], one["rows between hosts"]) == (0, 16)
    assert (two["rows"], two["rows between hosts"]) == (0, 8)
    assert [(rank["pair"], rank["pair between hosts"]) for rank in (one, two)] == [(0, 8)] * 2


def reduce_in_groups(rank: int, port: int) -> list[tuple[float, bool, bool]]:
    """The sums of groups, some with the same ranks; is the buffer of one host, did this rank send to another host?"""
    ledger, results = join_hosts(rank, "AABB", port).ledger, []
    for ranks in ([0, 1, 2], [0, 2], [0, 1], [2, 3], [0, 1, 2]):
        group = dist.new_group(ranks)
        if rank in ranks:
            ledger.sent_bytes.clear()
            time.sleep(0.3 * (rank == 0))  # others do not find its address in an earlier group of the same ranks
            buffer = empty(5, torch.empty(0), group)
            buffer[:] = 10**rank
            with named("the sums", "gradients"):
                dist.all_reduce(buffer, group=group)
            results.append((buffer[4].item(), shares(buffer, group), "gradients between hosts" in ledger.sent_bytes))
    dist.barrier()
    return results


def test_groups_on_one_host_and_on_several() -> None:
    first_of_host, second_of_host = (111, False, True), (111, False, False)
    across, first, second = (101, False, False), (11, True, False), (1100, True, False)
    assert run_ranks(4, reduce_in_groups, free_port()) == [
        [first_of_host, across, first, first_of_host],
        [second_of_host, first, second_of_host],
        [first_of_host, across, second, first_of_host],
        [second],
    ]


def do_without(rank: int, port: int) -> tuple[float, list[str]]:
    """The average of ranks on two hosts, on one of which there is no memory, and what was remarked."""
    remarks: list[str] = []
    join_hosts(rank, "AABB", port, "auto", remark=remarks.append)
    if rank == 3:
        os.posix_fallocate = refuse(errno.ENOSPC)
    buffer = empty(100_000, torch.empty(0))
    buffer[:] = rank
    dist.all_reduce(buffer, ReduceOp.AVG)
    dist.barrier()
    return buffer[-1].item(), remarks


def test_without_memory_on_one_host_all_of_them_use_gloo_and_say_why() -> None:
    why = {0: "the ranks of another host cannot share memory", 2: "no 0.8 MB of shared memory: No space left on device"}
    instead = "what these ranks cannot share goes over gloo instead"
    remarks = [[f"{why[rank]}; {instead}"] if rank in why else [] for rank in range(4)]
    assert run_ranks(4, do_without, free_port()) == [(1.5, remarks[rank]) for rank in range(4)]


def allocate_meanwhile(rank: int, port: int) -> list[float]:
    """The sums of two hosts, of which one is late for an all-reduce while the other makes the next buffer."""
    join_hosts(rank, "AAB", port)
    first = empty(70_000, torch.empty(0))
    first[:] = 1 + rank
    time.sleep(0.5 * (rank == 2))
    begun = dist.all_reduce(first, async_op=True)
    second = empty(70_000, torch.empty(0))
    begun.wait()
    second[:] = first
    dist.all_reduce(second)
    dist.barrier()
    return [first[-1].item(), second[-1].item()]


def test_a_buffer_is_made_after_what_was_started_before_it_on_all_hosts() -> None:
    assert run_ranks(3, allocate_meanwhile, free_port()) == [[6, 18]] * 3


def wait_in_parts(rank: int, port: int, end: Barrier) -> float:
    """How long rank 0 waits if a rank of its host is late, but not too late, and the other host never comes."""
    context = join_hosts(rank, "AAB", port)
    buffer = empty(70_000, torch.empty(0))
    context.waits.timeout_seconds = 2.5
    seconds = 0.0
    if rank < 2:
        time.sleep(2 * rank)
        started = time.monotonic()
        with pytest.raises(TrafficError):
            dist.all_reduce(buffer)
        seconds = time.monotonic() - started
    end.wait(20)
    return seconds


def test_all_parts_of_an_all_reduce_have_one_deadline() -> None:
    """With a deadline for each part, rank 0 would wait for 4.5 seconds."""
    assert 2.4 < run_ranks(3, wait_in_parts, free_port(), meeting_of(3))[0] < 4.3


def fail(rank: int, port: int, end: Barrier, failing: int, is_silent: bool) -> tuple[str, float]:
    """What the others say, and after how long, when a rank does not give its part: it is silent, or ends."""
    context = join_hosts(rank, "AAB", port)
    buffer = empty(300_000, torch.empty(0))
    if is_silent:
        context.waits.timeout_seconds = 0.5
    said = "", 0.0
    if rank != failing:
        started = time.monotonic()
        with pytest.raises(TrafficError) as caught, named("the gradients of bucket 7", "gradients"):
            dist.all_reduce(buffer)
        said = str(caught.value), time.monotonic() - started
    elif not is_silent:
        time.sleep(0.3)  # in which the others begin to wait; then the process ends
    if is_silent:
        end.wait(20)  # as a rank that finds out why: others do not lose it meanwhile
    return said


@pytest.mark.parametrize(("failing", "is_silent"), [(0, False), (1, True), (2, False)])
def test_a_wait_ends_with_the_usual_sentence(failing: int, is_silent: bool) -> None:
    by_rank = run_ranks(3, fail, free_port(), meeting_of(3), failing, is_silent)
    assert_told(by_rank, failing, "the gradients of bucket 7", is_silent)
