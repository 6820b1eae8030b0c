"""Collectives by hand: the library's results, on gloo and in the simulated world, with the messages they promise."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, process_group, run_ranks
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.collectives import algorithms as collectives
from distlab.collectives.buffers import Op, scratch_buffer
from distlab.collectives.simulation import SimulatedWorld
from distlab.comm.endpoint import Endpoint

OPS = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN]
DTYPES = [torch.float32, torch.int64, torch.bfloat16]
BROADCASTS = [collectives.broadcast_naive, collectives.broadcast_tree, collectives.broadcast_ring]
REDUCES = [collectives.reduce_naive, collectives.reduce_tree]


def allreduce_ring_both_ways(tensor: Tensor, op: Op = ReduceOp.SUM, endpoint: Endpoint = dist) -> None:
    """The ring as it treats large tensors."""
    collectives.allreduce_ring(tensor, op, endpoint, both_ways_bytes=0, segment_bytes=tensor.element_size())


def allreduce_ring_in_segments(tensor: Tensor, op: Op = ReduceOp.SUM, endpoint: Endpoint = dist) -> None:
    """The ring, with more segments than there are spaces."""
    collectives.allreduce_ring(tensor, op, endpoint, both_ways_bytes=1_000_000, segment_bytes=tensor.element_size())


ALL_REDUCES = [*collectives.ALL_REDUCES.values(), allreduce_ring_both_ways, allreduce_ring_in_segments]
GATHERS = [collectives.gather_naive, collectives.gather_tree]
ALL_GATHERS = [collectives.allgather_naive, collectives.allgather_tree, collectives.allgather_ring]
ALL_TO_ALLS = [collectives.alltoall_naive, collectives.alltoall_pairwise]
REDUCE_SCATTERS = [collectives.reducescatter_naive, collectives.reducescatter_ring]


def part(rank: int, dtype: torch.dtype) -> Tensor:
    """A rank's tensor, strided; small whole numbers, so that all orders of adding are exact in every dtype."""
    values = torch.randint(1, 3, (3, 5), generator=torch.Generator().manual_seed(rank)).to(dtype)
    return values.T


def check_all(endpoint: Endpoint = dist) -> int:
    """Every function with every root, operation and dtype, on this rank; how many were compared."""
    compared, rank, size = 0, endpoint.get_rank(), endpoint.get_world_size()

    def equal(own: Tensor, expected: Tensor, what: object) -> None:
        nonlocal compared
        assert torch.equal(own, expected), f"rank {rank} of {size}: {what}: {own} instead of {expected}"
        compared += 1

    for dtype in DTYPES:
        parts = torch.stack([part(other, dtype) for other in range(size)])
        for root in range(size):
            for broadcast in BROADCASTS:
                tensor = part(rank, dtype)
                broadcast(tensor, root, endpoint)
                equal(tensor, parts[root], broadcast)
            for gather in GATHERS:
                gathered = torch.full_like(parts, 7) if rank == root else None
                gather(part(rank, dtype), gathered, root, endpoint)
                if gathered is not None:
                    equal(gathered, parts, gather)
        for all_gather in ALL_GATHERS:
            gathered = torch.full_like(parts, 7)
            all_gather(part(rank, dtype), gathered, endpoint)
            equal(gathered, parts, all_gather)
        for all_to_all in ALL_TO_ALLS:  # rank r sends r + 2 s columns, of 100 r + s, to rank s; rank 0 none to itself
            sent = [torch.full((rank + 2 * other, 2), 100 * rank + other).to(dtype).T for other in range(size)]
            received = [torch.zeros(2, other + 2 * rank, dtype=dtype) for other in range(size)]
            all_to_all(sent, received, endpoint)
            for other, own in enumerate(received):
                equal(own, torch.full((2, other + 2 * rank), 100 * other + rank).to(dtype), all_to_all)
        for op in OPS:
            combined = {
                ReduceOp.SUM: parts.sum(0).to(dtype),
                ReduceOp.PRODUCT: parts.prod(0),
                ReduceOp.MAX: parts.amax(0),
                ReduceOp.MIN: parts.amin(0),
            }[op]
            for root in range(size):
                for reduce, tensor in itertools.product(REDUCES, (part(rank, dtype), part(rank, dtype).contiguous())):
                    own = tensor.clone()
                    reduce(own, root, op, endpoint)
                    equal(own, combined if rank == root else tensor, (reduce, op))
            for all_reduce in ALL_REDUCES:
                tensor = part(rank, dtype)
                all_reduce(tensor, op, endpoint)
                equal(tensor, combined, (all_reduce, op))
            for reduce_scatter in REDUCE_SCATTERS:
                mine = torch.stack([part(rank, dtype) + block for block in range(size)]).to(dtype)
                theirs = torch.stack([part(other, dtype) + rank for other in range(size)]).to(dtype)
                block = torch.empty(3, 5, dtype=dtype).T
                reduce_scatter(mine, block, op, endpoint)
                expected = {
                    ReduceOp.SUM: theirs.double().sum(0),
                    ReduceOp.PRODUCT: theirs.double().prod(0),
                    ReduceOp.MAX: theirs.double().amax(0),
                    ReduceOp.MIN: theirs.double().amin(0),
                }[op]
                tolerance = {torch.bfloat16: 0.05, torch.float32: 1e-6, torch.int64: 0.0}[dtype]
                assert torch.allclose(block.double(), expected, rtol=tolerance, atol=0), (reduce_scatter, op)
                within = mine[rank]
                reduce_scatter(mine, within, op, endpoint)
                assert torch.allclose(within.double(), expected, rtol=tolerance, atol=0), "of a part of the tensor"
                compared += 1
    return compared


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9])
def test_in_the_simulated_world(size: int) -> None:
    assert all(SimulatedWorld(size).run(check_all))


def check_on_gloo(rank: int, size: int, port: int) -> int:
    with process_group(rank, size, port):
        compared = check_all()
        for op in OPS:  # the library's own results, also where the order of adding matters
            values = torch.rand(100, generator=torch.Generator().manual_seed(rank)) + 0.5
            expected = values.clone()
            dist.all_reduce(expected, op)
            for all_reduce in ALL_REDUCES:
                tensor = values.clone()
                all_reduce(tensor, op)
                torch.testing.assert_close(tensor, expected)
                compared += 1
        return compared


def test_on_gloo() -> None:
    assert all(run_ranks(3, check_on_gloo, 3, free_port(), deadline=120))


def counts(size: int, work: Callable[..., object]) -> SimulatedWorld:
    world = SimulatedWorld(size)
    world.run(lambda endpoint: work(torch.ones(8), endpoint=endpoint))
    return world


def test_messages_are_those_that_the_topologies_promise() -> None:
    naive = counts(8, partial(collectives.broadcast_naive, src=2))
    assert [rank.sends for rank in naive.counts] == [0, 0, 7, 0, 0, 0, 0, 0]
    reduced = counts(8, partial(collectives.reduce_naive, dst=2))
    assert [rank.receives for rank in reduced.counts] == [0, 0, 7, 0, 0, 0, 0, 0]
    assert counts(4, partial(collectives.broadcast_tree, src=0)).counts[0].sends == 2
    ring = counts(5, partial(collectives.broadcast_ring, src=1))
    assert [rank.sends for rank in ring.counts] == [0, 1, 1, 1, 1]
    assert counts(8, partial(collectives.reduce_tree, dst=0)).counts[0].receives == 3
    butterfly = counts(8, collectives.allreduce_butterfly)
    for rank, own in enumerate(butterfly.counts):
        assert own.sends == own.receives == 3
        assert own.sent_to == [rank ^ 1, rank ^ 2, rank ^ 4]
    through_0 = counts(4, collectives.allreduce_naive)
    assert [rank.sends for rank in through_0.counts] == [3, 1, 1, 1]
    assert [rank.sent_to for rank in through_0.counts[1:]] == [[0], [0], [0]]
    rings = ((collectives.allreduce_ring, 6), (allreduce_ring_both_ways, 12), (allreduce_ring_in_segments, 12))
    for all_reduce, to_each in rings:
        ring = counts(4, all_reduce)
        assert all(rank.sent_bytes == rank.received_bytes == 2 * 3 * 32 // 4 for rank in ring.counts)
        assert all(rank.sends == rank.receives == to_each for rank in ring.counts)
    one_way, both_ways = counts(4, collectives.allreduce_ring), counts(4, allreduce_ring_both_ways)
    assert [set(rank.sent_to) for rank in one_way.counts] == [{1}, {2}, {3}, {0}]
    assert [set(rank.sent_to) for rank in both_ways.counts] == [{1, 3}, {0, 2}, {1, 3}, {0, 2}]


def test_an_unknown_operation_is_refused_before_anything_is_sent() -> None:
    world = SimulatedWorld(2)
    with pytest.raises(ValueError, match="combine with SUM, PRODUCT, MAX or MIN"):
        world.run(lambda endpoint: collectives.allreduce_naive(torch.ones(2), ReduceOp.BAND, endpoint))
    assert world.counts[0].sends == world.counts[1].sends == 0


def test_a_root_that_is_none_is_refused_on_every_rank() -> None:
    x = torch.ones(2)
    calls: list[Callable[..., object]] = [partial(broadcast, x) for broadcast in BROADCASTS]
    calls += [partial(reduce, x) for reduce in REDUCES]
    calls += [partial(gather, x, torch.ones(3, 2)) for gather in GATHERS]
    for call in calls:
        for root in (3, -1):
            refused = SimulatedWorld(3).run(partial(refusal, partial(call, root)))
            assert refused == [f"root {root}: the world has the ranks 0 to 2"] * 3


def refusal(call: Callable[..., object], endpoint: Endpoint) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the callers compare the message
        call(endpoint=endpoint)
    return str(caught.value)


def test_parts_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    x, too_many = torch.ones(2), torch.ones(5, 2)
    calls: list[Callable[..., object]] = [partial(all_gather, x, too_many) for all_gather in ALL_GATHERS]
    calls += [partial(reduce_scatter, too_many, x) for reduce_scatter in REDUCE_SCATTERS]
    for call in calls:
        world = SimulatedWorld(3)
        refused = world.run(partial(refusal, call))
        assert set(refused) == {"a part (2,) for each rank needs a tensor (3, 2) on this rank, not one (5, 2)"}
        assert all(rank.sends == 0 for rank in world.counts)


def test_tensors_that_need_a_gradient_and_calls_in_inference_mode() -> None:
    def everything(endpoint: Endpoint) -> None:
        rank = endpoint.get_rank()
        for call in (torch.inference_mode(), torch.enable_grad()):
            with call:
                own = torch.full((3,), rank + 1.0).requires_grad_(not torch.is_inference_mode_enabled())
                for all_reduce in ALL_REDUCES:
                    tensor = own.detach().clone()
                    all_reduce(tensor, endpoint=endpoint)
                    assert torch.equal(tensor, torch.full((3,), 6.0))
                for gather in GATHERS:
                    gathered = torch.zeros(3, 3)
                    gather(own, gathered, 1, endpoint)
                    assert not gathered.requires_grad
                    assert rank != 1 or torch.equal(gathered[:, 0], torch.tensor([1.0, 2.0, 3.0]))
                for reduce_scatter in REDUCE_SCATTERS:
                    block = torch.zeros(3)
                    reduce_scatter(torch.stack([own] * 3), block, endpoint=endpoint)
                    assert torch.equal(block, torch.full((3,), 6.0))
        leaf = torch.full((3,), float(rank), requires_grad=True)
        collectives.allreduce_ring(leaf, endpoint=endpoint)
        collectives.broadcast_tree(leaf, 0, endpoint)
        assert leaf.requires_grad
        assert leaf.tolist() == [3.0] * 3

    SimulatedWorld(3).run(everything)


def test_ranks_that_only_give_may_give_what_cannot_be_written() -> None:
    def give(endpoint: Endpoint) -> None:
        rank = endpoint.get_rank()
        tensor = torch.ones(4) if rank == 0 else torch.ones(1).expand(4)
        for reduce in REDUCES:
            reduce(tensor, 0, endpoint=endpoint)
        assert rank > 0 or tensor.tolist() == [5.0] * 4

    SimulatedWorld(3).run(give)


@pytest.mark.parametrize(
    ("dtype", "ops"),
    [(torch.complex64, [ReduceOp.MAX, ReduceOp.MIN]), (torch.uint16, [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN])],
)
def test_what_torch_cannot_combine_is_refused_on_every_rank(dtype: torch.dtype, ops: list[Op]) -> None:
    x, blocks = torch.ones(2).to(dtype), torch.ones(3, 2).to(dtype)
    calls: list[Callable[..., object]] = [partial(reduce, x, 0) for reduce in REDUCES]
    calls += [partial(all_reduce, x) for all_reduce in ALL_REDUCES]
    calls += [partial(reduce_scatter, blocks, x) for reduce_scatter in REDUCE_SCATTERS]
    for call, op in itertools.product(calls, ops):
        world = SimulatedWorld(3)
        refused = world.run(partial(refusal, partial(call, op=op)))
        assert len(set(refused)) == 1
        assert f"of {dtype}: the collectives combine with SUM, PRODUCT, MAX or MIN" in refused[0]
        assert all(rank.sends == 0 for rank in world.counts)


def test_complex_numbers_are_added_and_multiplied() -> None:
    def combine(endpoint: Endpoint) -> list[complex]:
        rank = endpoint.get_rank()
        total, product = torch.full((3,), 1j + rank), torch.full((3,), 1j + rank)
        collectives.allreduce_ring(total, endpoint=endpoint)
        collectives.allreduce_butterfly(product, ReduceOp.PRODUCT, endpoint)
        return [total[0].item(), product[0].item()]

    assert SimulatedWorld(3).run(combine) == [[3 + 3j, -3 + 1j]] * 3


def test_scratch_memory_is_kept_up_to_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.collectives.buffers.KEPT_BYTES", 400)
    kept, larger = torch.empty(100), torch.empty(101)  # four bytes each
    first, second = scratch_buffer(kept), scratch_buffer(kept, 1)
    assert scratch_buffer(kept) is first is not second is scratch_buffer(kept, 1)
    assert scratch_buffer(larger) is not scratch_buffer(larger)
