"""Collectives in memory that ranks share: sums to the last bit, and their order."""

import threading
import time
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.operands import combined, operand
from support.processes import free_port, meeting_of, process_group, run_ranks, wait_for
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.context import Options, TransportName
from distlab.comm.group import all_gather_single, empty, reduce_scatter_single, shares
from distlab.comm.names import named
from distlab.comm.transports import slots
from distlab.comm.transports.transport import overlapping

SIZES = [1, 7, 1001, 300_007]  # of the last, a share has several chunks
SHARED = Options(transport="shared")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT]


def promised(world_size: int, elements: int, dtype: torch.dtype, op: ReduceOp.RedOpType) -> Tensor:
    result = combined([operand(rank, elements, dtype) for rank in range(world_size)], op)
    return result / world_size if op == ReduceOp.AVG else result


def reduce_all(rank: int, world_size: int, port: int, expected: list[Tensor]) -> None:
    """All-reduces of all sizes, types and operations, several under way at a time."""
    with process_group(rank, world_size, port, options=SHARED) as context:
        promised = iter(expected)
        for dtype in DTYPES:
            buffers = [empty(elements, torch.empty(0, dtype=dtype)) for elements in SIZES]
            plain = [buffer.clone() for buffer in buffers]
            for op in OPS:
                for tensor in (*buffers, *plain):
                    tensor.copy_(operand(rank, len(tensor), dtype))
                begun = [dist.all_reduce(tensor, op, async_op=True) for tensor in (*buffers, *plain)]
                for pending in begun:
                    pending.wait()
                for own, sums in zip((*buffers, *plain), promised, strict=False):
                    torch.testing.assert_close(own, sums, rtol=0, atol=0)
        assert next(promised, None) is None
        assert context.shares_memory == (world_size > 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_have_the_sums_in_the_order_of_the_ranks(world_size: int) -> None:
    sizes = [*SIZES, *SIZES]  # in shared memory, and through its slots
    expected = [promised(world_size, size, dtype, op) for dtype in DTYPES for op in OPS for size in sizes]
    run_ranks(world_size, reduce_all, world_size, free_port(), expected)


def run_ahead(rank: int, port: int) -> None:
    """Sums of which one rank is late to read the slots, as another rank already has its next pieces."""
    combine = slots.combine_in_order

    def late(*args: Any) -> None:
        time.sleep(0.02)
        combine(*args)

    with process_group(rank, 3, port, options=SHARED), pytest.MonkeyPatch.context() as monkeypatch:
        if rank == 1:
            monkeypatch.setattr(slots, "combine_in_order", late)
        for number in range(12):
            dtype, shape = (torch.float32, torch.float64)[number % 3 == 2], (2, [25, 350_001][number % 2])
            total = torch.full(shape, rank + 10.0 * number, dtype=dtype)
            dist.all_reduce(total)
            assert torch.equal(total, torch.full(shape, 3 + 30.0 * number, dtype=dtype))


def test_a_rank_that_runs_ahead_does_not_overwrite_what_others_still_read() -> None:
    run_ranks(3, run_ahead, free_port())


def pass_on(rank: int, world_size: int, transport: TransportName, port: int) -> None:
    """Reduce-scatters, all-gathers and broadcasts, in shared memory or not, have the bits that are promised."""
    ranks = range(world_size)
    with process_group(rank, world_size, port, options=Options(transport=transport)) as context:
        for dtype in (*DTYPES, torch.float16):
            exact = torch.float32 if dtype.itemsize == 2 else dtype
            for elements in (1, 7, 70_001):
                rows = [[operand(10 * sender + row, elements, dtype) for row in ranks] for sender in ranks]
                expected = sum((rows[sender][rank].to(exact) for sender in ranks[1:]), rows[0][rank].to(exact))
                like = torch.empty(world_size, elements, dtype=dtype)
                buffer, source = empty(like.numel(), like), empty(elements, like)
                assert shares(buffer) == shares(source[-1:]) == (world_size > 1 and transport == "shared")
                for parts in (buffer.view_as(like), torch.empty_like(like)):
                    for own in (parts[rank], torch.empty(elements, dtype=dtype)):
                        parts.copy_(torch.stack(rows[rank]))
                        with named("the sums", "gradients"):
                            reduce_scatter_single(own, parts)
                        assert torch.equal(own, expected.to(dtype))
                    for own in (parts[rank], source, torch.empty(elements, dtype=dtype)):
                        parts.fill_(-1)
                        own.copy_(rows[rank][0])
                        with named("the rows", "weights"):
                            all_gather_single(parts, own)
                        assert torch.equal(parts, torch.stack([rows[sender][0] for sender in ranks]))
                for own in (source, torch.empty(elements, dtype=dtype)):
                    for sender in ranks:
                        own.copy_(rows[rank][0])
                        with named("a row", "a row of each"):
                            dist.broadcast(own, sender)
                        assert torch.equal(own, rows[sender][0])
        sent_bytes = context.ledger.sent_bytes
        assert sent_bytes["gradients"] * 3 == sent_bytes["weights"] * 2 or world_size == 1, "four and six of each"
        assert sent_bytes["a row of each"] * 3 * (world_size - 1) == sent_bytes["weights"], "two of each rank"


@pytest.mark.parametrize(("world_size", "transport"), [(1, "shared"), (2, "shared"), (3, "shared"), (3, "gloo")])
def test_reduce_scatter_all_gather_and_broadcast_are_those_over_gloo_to_the_last_bit(
    world_size: int, transport: TransportName
) -> None:
    run_ranks(world_size, pass_on, world_size, transport, free_port())


def give_different_places(rank: int, port: int) -> None:
    """Each rank's tensor begins at another place of its shared memory, and that of rank 2 lies in another buffer."""
    with process_group(rank, 3, port, options=SHARED):
        like = torch.empty(0)
        first, second = empty(60, like), empty(60, like)
        own = (second if rank == 2 else first)[7 * rank + 1 :][:6]
        rows = torch.arange(18.0).view(3, 6)

        def filled() -> Tensor:
            first.fill_(-1)
            second.fill_(-1)
            return own.copy_(rows[rank])

        dist.all_reduce(filled())
        assert torch.equal(own, rows.sum(0))
        for source in range(3):
            dist.broadcast(filled(), source)
            assert torch.equal(own, rows[source])
        for gathered in (torch.empty(3, 6), first[30 + rank :][:18].view(3, 6)):
            all_gather_single(gathered, filled())
            assert torch.equal(gathered, rows)
            dist.all_gather(list(gathered.zero_()), filled())
            assert torch.equal(gathered, rows)
        part, received = torch.empty(2), torch.empty(6)
        reduce_scatter_single(part, filled())
        assert torch.equal(part, rows.sum(0)[2 * rank :][:2])
        dist.all_to_all_single(received, filled())
        assert torch.equal(received, rows[:, 2 * rank :][:, :2].flatten())
        reduced = filled()
        dist.reduce(reduced, 1)
        assert rank != 1 or torch.equal(reduced, rows.sum(0))
        assert first[0] == second[0] == -1


def test_ranks_may_give_tensors_at_different_places_of_their_shared_memory() -> None:
    run_ranks(3, give_different_places, free_port())


def start_many(rank: int, port: int) -> None:
    """A collective for each element of a buffer, and some through slots, before any wait."""
    with process_group(rank, 3, port, options=SHARED):
        buffer, others = empty(137, torch.empty(0)).fill_(rank + 1), torch.full((9,), rank + 1.0)
        begun = []
        for number in range(len(buffer)):
            begun.append(dist.all_reduce(buffer[number : number + 1], async_op=True))
            if number % 16 == 0:
                begun.append(dist.all_reduce(others[number // 16 :][:1], async_op=True))
        for pending in begun:
            pending.wait()
        assert buffer.eq(6).all()
        assert others.eq(6).all()


def test_any_number_of_collectives_may_start_before_the_first_is_waited_for() -> None:
    run_ranks(3, start_many, free_port())


def start_far_ahead(rank: int, port: int) -> list[float]:
    """Rank 0 starts all collectives through slots before it waits for the first, the other ranks wait for each."""
    with process_group(rank, 3, port, options=SHARED):
        tensors = [torch.ones(1 + number // 128) for number in range(256)]
        begun: list[Any] = [dist.all_reduce(tensor, async_op=rank == 0) for tensor in tensors]
        for pending in begun if rank == 0 else []:
            pending.wait()
        return torch.cat(tensors).unique().tolist()


def test_a_rank_that_is_far_ahead_has_called_the_same_collectives() -> None:
    assert run_ranks(3, start_far_ahead, free_port()) == [[3.0]] * 3


def wait_in_another_order(rank: int, port: int) -> list[float]:
    """Rank 0 waits for the second collective first, the others for the first one, whose tensors are in place."""
    with process_group(rank, 3, port, timeout_seconds=10, options=SHARED):
        tensors = [empty(5, torch.empty(0)).fill_(1), torch.full((5,), 10.0)]
        begun: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for pending in begun if rank else reversed(begun):
            pending.wait()
        tensors.append(torch.full((5,), 100.0))
        with overlapping():
            assert not shares(empty(5, torch.empty(0))), "nothing would happen before all ranks wait"
            overlapped: Any = dist.all_reduce(tensors[2], async_op=True)
        assert len(empty(0, torch.empty(0))) == 0
        if rank == 0:
            dist.recv(torch.empty(1), 1)  # as a rank that computes, until another one has its result
        overlapped.wait()
        if rank == 1:
            dist.send(torch.empty(1), 0)
        return [tensor[4].item() for tensor in tensors]


def test_ranks_may_wait_for_collectives_in_different_orders() -> None:
    assert run_ranks(3, wait_in_another_order, free_port()) == [[3, 30, 300]] * 3


def look_while_it_waits(rank: int, port: int, meeting: Barrier) -> list[dict[str, list[int]]]:
    """What rank 0 holds back before it waits for two collectives, and while rank 1 still holds back the second."""
    with process_group(rank, 2, port, timeout_seconds=10, options=SHARED) as context:
        begun: list[Any] = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(2)]
        found = [context.held_back()]

        def look() -> None:
            wait_for(lambda: not context.held_back(), seconds=5)
            found.append(context.held_back())
            meeting.wait(20)

        looks = threading.Thread(target=look if rank == 0 else partial(meeting.wait, 20))
        looks.start()
        if rank:
            looks.join()
        for pending in begun:
            pending.wait()
        looks.join()
        return found


def test_what_a_rank_waits_for_it_does_not_hold_back() -> None:
    held_back, nothing = run_ranks(2, look_while_it_waits, free_port(), meeting_of(2))
    assert held_back == [{"0,1": [0, 1]}, {}]
    assert nothing == held_back[:1]
