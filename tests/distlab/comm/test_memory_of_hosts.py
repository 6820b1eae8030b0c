"""All-reduces over several hosts: in shared memory on each, over gloo between them. Here a letter names a host."""

import errno
import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, run_ranks
from support.refusals import refuse
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.devices import patient_threads
from distlab.comm.hosts import Hosts, MemoryOfHosts
from distlab.comm.traffic import traffic
from distlab.comm.transfer import wait_for_all
from distlab.comm.waits import TrafficError
from distlab.rendezvous.ranks import open_store

pytestmark = pytest.mark.alone
SIZES = [100_001, 70_000, 300_007]
DTYPES = [torch.float32, torch.bfloat16]
OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX]


def join(rank: int, hosts: str, port: int) -> None:
    """Set up the process group of ranks that are on hosts of these names."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = open_store(rank, "localhost", port, 30, lambda _: None)
    with patient_threads():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(hosts))
    traffic.hosts = Hosts(hosts, store)
    traffic.smallest_shared_bytes = traffic.smallest_of_hosts_bytes = 1


def operand(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)).to(dtype)


def combine(operands: Sequence[Tensor], op: ReduceOp.RedOpType) -> Tensor:
    """Combined in their order."""
    result = operands[0]
    for other in operands[1:]:
        result = torch.maximum(result, other) if op == ReduceOp.MAX else result + other
    return result


def promised(hosts: str, elements: int, dtype: torch.dtype, op: ReduceOp.RedOpType) -> Tensor:
    """What the documentation promises: the ranks of each host in their order, then the hosts."""
    operands = [operand(rank, elements, dtype) for rank in range(len(hosts))]
    of_hosts = [
        combine([x for x, its_host in zip(operands, hosts, strict=True) if its_host == host], op)
        for host in dict.fromkeys(hosts)
    ]
    result = combine(of_hosts, op)
    return result / len(hosts) if op == ReduceOp.AVG else result


def reduce_alone(rank: int, port: int) -> tuple[bool, float, set[str]]:
    """Whether a buffer of ranks that are on a host each is shared, its sum, and what it was counted as."""
    join(rank, "ab", port)
    buffer = traffic.new_buffer(SIZES[0], torch.empty(0)).fill_(rank + 1)
    traffic.all_reduce(buffer, "the sums", kind="gradients", op=ReduceOp.SUM).wait()
    return bool(traffic._shared), buffer[-1].item(), set(traffic.ledger.sent_bytes)


def test_ranks_on_a_host_each_share_nothing() -> None:
    assert run_ranks(2, reduce_alone, free_port()) == [(False, 3.0, {"gradients"})] * 2


def reduce_all(rank: int, hosts: str, port: int) -> tuple[list[Tensor], dict[str, int]]:
    """All-reduces of all sizes, types and operations, and what was sent for the last type and operation."""
    join(rank, hosts, port)
    results = []
    for dtype in DTYPES:
        buffers = [traffic.new_buffer(elements, torch.empty(0, dtype=dtype)) for elements in SIZES]
        assert isinstance(traffic._shared[dist.distributed_c10d._get_default_group()], MemoryOfHosts)
        for op in OPS:
            for buffer in buffers:
                buffer.copy_(operand(rank, len(buffer), dtype))
            traffic.ledger.sent_bytes.clear()
            begun = [traffic.all_reduce(b, "the sums", kind="gradients", op=op) for b in buffers]
            begun[1].wait()  # in another order than that in which they have begun
            wait_for_all(begun)
            results += [buffer.clone() for buffer in buffers]
    sent_bytes = dict(traffic.ledger.sent_bytes)
    own = operand(rank, 100_001, torch.float32)  # is copied in and out
    results.append(traffic.all_reduced(own, "the sums", kind="activations", op=ReduceOp.SUM))
    assert traffic._buffers
    parts = traffic.new_buffer(2 * len(hosts), own).view(len(hosts), 2)
    parts[:] = rank
    traffic.reduce_scatter(parts[rank], parts, "the sums", kind="gradients").wait()
    assert parts[rank].tolist() == [sum(range(len(hosts)))] * 2
    traffic.all_gather(parts, parts[rank], "the rows", kind="weights").wait()
    assert (parts == sum(range(len(hosts)))).all()
    dist.barrier()
    return results, sent_bytes


@pytest.mark.parametrize("hosts", ["AAB", "ABABB", "ABCA"])
def test_sums_are_those_of_each_hosts_ranks_and_then_of_the_hosts(hosts: str) -> None:
    expected = [promised(hosts, size, dtype, op) for dtype in DTYPES for op in OPS for size in SIZES]
    expected.append(promised(hosts, 100_001, torch.float32, ReduceOp.SUM))
    by_rank = run_ranks(len(hosts), reduce_all, hosts, free_port())
    for rank, (results, sent_bytes) in enumerate(by_rank):
        for own, rank_0s, those in zip(results, by_rank[0][0], expected, strict=True):
            assert torch.equal(own, rank_0s)
            if len(set(hosts)) == 2:
                assert torch.equal(own, those)
            else:  # gloo adds up three hosts in an order of its own
                torch.testing.assert_close(own, those, rtol=1e-5, atol=1e-4 if own.dtype == torch.float32 else 0.1)
        here, size_bytes = hosts.count(hosts[rank]), 2 * sum(SIZES)
        inside, between = 2 * (here - 1) / here * size_bytes, 2 * (len(set(hosts)) - 1) / len(set(hosts)) * size_bytes
        is_first = hosts.index(hosts[rank]) == rank
        assert sent_bytes["gradients"] == pytest.approx(inside, abs=3)
        assert sent_bytes.get("gradients between hosts", 0) == pytest.approx(between * is_first, abs=3)


def reduce_in_groups(rank: int, port: int) -> list[tuple[float, str]]:
    """The sums of groups, some with the same ranks, and what their memory is: none if each rank is on its own host."""
    hosts = "AABB"
    join(rank, hosts, port)
    results = []
    for ranks in ([0, 1, 2], [0, 2], [0, 1], [2, 3], [0, 1, 2]):
        group = dist.new_group(ranks)
        if rank in ranks:
            buffer = traffic.new_buffer(5, torch.empty(0), group)
            buffer[:] = 10**rank
            traffic.all_reduce(buffer, "the sums", kind="gradients", op=ReduceOp.SUM, group=group).wait()
            results.append((buffer[4].item(), type(traffic._shared.get(group)).__name__))
    dist.barrier()
    return results


def test_groups_on_one_host_and_on_several() -> None:
    several = 111, "MemoryOfHosts"
    across, first, second = (101, "NoneType"), (11, "SharedMemory"), (1100, "SharedMemory")
    assert run_ranks(4, reduce_in_groups, free_port()) == [
        [several, across, first, several],
        [several, first, several],
        [several, across, second, several],
        [second],
    ]


def do_without(rank: int, port: int) -> tuple[float, list[str]]:
    """The average of ranks on two hosts, on one of which there is no memory, and what was remarked."""
    join(rank, "AABB", port)
    remarks: list[str] = []
    traffic.remark = remarks.append

    if rank == 3:
        os.posix_fallocate = refuse(errno.ENOSPC)
    buffer = traffic.new_buffer(100_000, torch.empty(0))
    buffer[:] = rank
    traffic.all_reduce(buffer, "the average", kind="gradients").wait()
    dist.barrier()
    return buffer[-1].item(), remarks


def test_without_memory_on_one_host_all_of_them_use_gloo_and_say_why() -> None:
    why = {0: "the ranks of another host cannot share memory", 2: "no 0.8 MB of shared memory: No space left on device"}
    instead = "what these ranks cannot share goes over gloo instead"
    remarks = [[f"{why[rank]}; {instead}"] if rank in why else [] for rank in range(4)]
    assert run_ranks(4, do_without, free_port()) == [(1.5, remarks[rank]) for rank in range(4)]


def allocate_meanwhile(rank: int, port: int) -> list[float]:
    """The sums of two hosts, on one of which an all-reduce is late while the next buffer is made."""
    join(rank, "AB", port)
    combine = MemoryOfHosts._combine

    def combine_late(*args: Any) -> None:
        time.sleep(0.5 * rank)
        combine(*args)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(MemoryOfHosts, "_combine", combine_late)
        first = traffic.new_buffer(70_000, torch.empty(0))
        first[:] = 1 + rank
        begun = traffic.all_reduce(first, "the sums", kind="gradients", op=ReduceOp.SUM)
        second = traffic.new_buffer(70_000, torch.empty(0))
        begun.wait()
        second[:] = first
        traffic.all_reduce(second, "the sums", kind="gradients", op=ReduceOp.SUM).wait()
    dist.barrier()
    return [first[-1].item(), second[-1].item()]


def test_a_buffer_is_made_after_what_was_started_before_it_on_all_hosts() -> None:
    assert run_ranks(2, allocate_meanwhile, free_port()) == [[3, 6]] * 2


def wait_in_parts(rank: int, port: int) -> float:
    """How long rank 0 waits if a rank of its host is late, but not too late, and the other host never comes."""
    join(rank, "AAB", port)
    buffer = traffic.new_buffer(70_000, torch.empty(0))
    traffic.timeout_seconds = 3
    if rank == 2:
        time.sleep(8)
        return 0.0
    time.sleep(2.5 * rank)
    started = time.monotonic()
    with pytest.raises(TrafficError):
        traffic.all_reduce(buffer, "the gradients of bucket 7", kind="gradients").wait()
    seconds = time.monotonic() - started
    time.sleep(4 * rank)  # rank 0 does not lose it meanwhile
    return seconds


def test_all_parts_of_an_all_reduce_have_one_deadline() -> None:
    assert 3 < run_ranks(3, wait_in_parts, free_port())[0] < 5.5


def fail(rank: int, port: int, failing: int, is_silent: bool) -> tuple[str, float]:
    """What the others say, and after how long, when a rank does not give its part: it is silent, or ends."""
    join(rank, "AAB", port)
    buffer = traffic.new_buffer(300_000, torch.empty(0))
    if is_silent:
        traffic.timeout_seconds = 1
    if rank == failing:
        time.sleep(4 if is_silent else 0.5)
        return "", 0.0  # and the process ends
    started = time.monotonic()
    with pytest.raises(TrafficError) as caught:
        traffic.all_reduce(buffer, "the gradients of bucket 7", kind="gradients").wait()
    seconds = time.monotonic() - started
    time.sleep(1.5 * is_silent)  # as a rank that finds out why: others do not lose it meanwhile
    return str(caught.value), seconds


@pytest.mark.parametrize(("failing", "is_silent"), [(0, False), (1, True), (2, False)])
def test_a_wait_ends_with_the_usual_sentence(failing: int, is_silent: bool) -> None:
    for rank, (sentence, seconds) in enumerate(run_ranks(3, fail, free_port(), failing, is_silent)):
        if rank != failing:
            peers = " and ".join(str(peer) for peer in range(3) if peer != rank)
            assert sentence.startswith(f"rank {rank} waited ")
            assert f" s for the gradients of bucket 7 from ranks {peers}: " in sentence
            assert ("no answer" if is_silent else "a rank has exited") in sentence
            assert seconds < 5
