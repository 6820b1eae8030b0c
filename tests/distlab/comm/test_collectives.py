"""Every collective and message of `torch.distributed` through the lab's backend, beside sums computed by hand."""

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, process_group, run_ranks
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.context import Group, Options, TransportName, context_of
from distlab.comm.group import all_gather_single, empty, reduce_scatter_single

SIZES = [0, 1, 3, 1000, 300_001]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]
OPS = [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT]


def operand(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, all of whose sums and products every dtype has exactly."""
    return torch.randint(-3, 4, (elements,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def combine(operands: Sequence[Tensor], op: ReduceOp.RedOpType) -> Tensor:
    stacked = torch.stack(list(operands))
    if op == ReduceOp.MAX:
        return stacked.amax(0)
    if op == ReduceOp.MIN:
        return stacked.amin(0)
    return stacked.prod(0) if op == ReduceOp.PRODUCT else stacked.sum(0)


class Compared:
    """One rank of a group, and all the calls that are compared, for one size and dtype.

    Args:
        group: the group.
        ranks: its ranks in the world.
        elements: of each rank's tensor.
        is_shared: whether the tensors are in the memory of the group, not in plain memory.
    """

    def __init__(self, group: Group, ranks: Sequence[int], elements: int, dtype: torch.dtype, is_shared: bool) -> None:
        self.group, self.rank, self.size = group, ranks.index(dist.get_rank()), len(ranks)
        self.elements, self.dtype = elements, dtype
        self.all = [operand(rank, elements, dtype) for rank in ranks]
        self.grid = [  # by sender and receiver
            [operand(100 * sender + receiver, elements, dtype) for receiver in range(self.size)]
            for sender in range(self.size)
        ]
        like = torch.empty(0, dtype=dtype)
        make: Callable[[int], Tensor] = like.new_zeros
        if is_shared:
            make = lambda length: empty(length, like, group)  # noqa: E731
        self.own, self.other = make(elements), make(elements)
        self.whole, self.whole_other = (make(self.size * elements).view(self.size, elements) for _ in range(2))
        self.found: list[int] = []  # what this rank has at the end of calls that give all ranks the same

    def mine(self) -> Tensor:
        return self.own.copy_(self.all[self.rank])

    def same(self, tensor: Tensor, expected: Tensor) -> None:
        assert torch.equal(tensor, expected.to(self.dtype).view(tensor.shape))

    def all_reduce(self) -> None:
        for op in OPS:
            dist.all_reduce(self.mine(), op, self.group)
            self.same(self.own, combine(self.all, op))
        if self.dtype == torch.int64:  # an operation that the library alone knows
            dist.all_reduce(self.mine(), ReduceOp.BAND, self.group)
            self.same(self.own, functools.reduce(torch.bitwise_and, self.all))
        if self.dtype.is_floating_point:
            dist.all_reduce(self.mine(), ReduceOp.AVG, self.group)
            mean = (combine(self.all, ReduceOp.SUM) / self.size).to(self.dtype)
            torch.testing.assert_close(self.own, mean)
            self.own.normal_(generator=torch.Generator().manual_seed(self.rank))
            dist.all_reduce(self.own, group=self.group)
            self.found.append(zlib.crc32(self.own.view(torch.uint8).numpy().tobytes()))

    def to_and_from_a_root(self) -> None:
        for root in range(self.size):
            dist.broadcast(self.mine(), group=self.group, group_src=root)
            self.same(self.own, self.all[root])
            for op in OPS[:2]:
                dist.reduce(self.mine(), op=op, group=self.group, group_dst=root)
                if self.rank == root:
                    self.same(self.own, combine(self.all, op))
            rows = list(self.whole.fill_(-1)) if self.rank == root else None
            dist.gather(self.mine(), rows, group=self.group, group_dst=root)
            if rows is not None:
                self.same(self.whole, torch.stack(self.all))
            rows = list(self.whole.copy_(torch.stack(self.all))) if self.rank == root else None
            dist.scatter(self.own.fill_(-1), rows, group=self.group, group_src=root)
            self.same(self.own, self.all[self.rank])

    def all_gather(self) -> None:
        if self.elements == 1000 and self.size > 1:
            rows = [self.own.new_empty(self.elements + rank) for rank in range(self.size)]
            with pytest.raises(RuntimeError, match="invalid tensor size"):
                dist.all_gather(rows, rows[self.rank], self.group)
        dist.all_gather(list(self.whole.fill_(-1)), self.mine(), self.group)
        self.same(self.whole, torch.stack(self.all))
        for own in (self.mine(), self.whole[self.rank]):  # also where its row is
            self.whole.fill_(-1)
            own.copy_(self.all[self.rank])
            all_gather_single(self.whole, own, self.group)
            self.same(self.whole, torch.stack(self.all))

    def reduce_scatter(self) -> None:
        to_this = [row[self.rank] for row in self.grid]
        for op in OPS:
            self.whole.copy_(torch.stack(self.grid[self.rank]))
            reduce_scatter_single(self.own.fill_(-1), self.whole, op, self.group)
            self.same(self.own, combine(to_this, op))
            self.same(self.whole, torch.stack(self.grid[self.rank]))
        if self.dtype == torch.int64:
            reduce_scatter_single(self.own.fill_(-1), self.whole, ReduceOp.BAND, self.group)
            self.same(self.own, functools.reduce(torch.bitwise_and, to_this))
        else:
            reduce_scatter_single(self.own.fill_(-1), self.whole, ReduceOp.AVG, self.group)
            torch.testing.assert_close(self.own, (combine(to_this, ReduceOp.SUM) / self.size).to(self.dtype))
        dist.reduce_scatter(self.own.fill_(-1), list(self.whole), group=self.group)
        self.same(self.own, combine(to_this, ReduceOp.SUM))

    def all_to_all(self) -> None:
        to_this = torch.stack([row[self.rank] for row in self.grid])
        self.whole.copy_(torch.stack(self.grid[self.rank]))
        dist.all_to_all_single(self.whole_other.fill_(-1), self.whole, group=self.group)
        self.same(self.whole_other, to_this)
        dist.all_to_all(list(self.whole_other.fill_(-1)), list(self.whole), group=self.group)
        self.same(self.whole_other, to_this)
        equal = self.own.new_full((self.size * (self.rank + 1),), self.rank)  # sizes on one side only
        numbers = torch.arange(self.size).repeat_interleave(torch.arange(self.size) + 1)
        into = self.own.new_full((len(numbers),), -1)
        dist.all_to_all_single(into, equal, [source + 1 for source in range(self.size)], group=self.group)
        self.same(into, numbers)
        # The first rank sends most, more than any rank receives.
        sizes = [
            [max(0, self.elements // (1 + 9 * sender) - receiver) for receiver in range(self.size)]
            for sender in range(self.size)
        ]
        sent, received = sizes[self.rank], [row[self.rank] for row in sizes]
        source = torch.cat([part[:length] for part, length in zip(self.grid[self.rank], sent, strict=True)])
        into = source.new_full((sum(received),), -1)
        ledger = context_of(self.group).ledger.sent_bytes
        before = ledger["all_to_all"]
        dist.all_to_all_single(into, source, received, sent, group=self.group)
        assert ledger["all_to_all"] - before == source.nbytes - sent[self.rank] * source.itemsize or self.size == 1
        expected = [row[self.rank][:length] for row, length in zip(self.grid, received, strict=True)]
        self.same(into, torch.cat(expected))
        parts = [source.new_full((length,), -1) for length in received]
        dist.all_to_all(parts, list(source.split(sent)), group=self.group)
        self.same(torch.cat(parts), torch.cat(expected))

    def coalesced(self) -> None:
        """Two tensors a call, as compiled code has them, and torch's parallel layers."""
        group: Any = self.group or dist.group.WORLD
        calls, name = torch.ops._c10d_functional, group.group_name
        of_ranks = [torch.stack(self.all), torch.stack([row[0] for row in self.grid])]
        own = [rows[self.rank] for rows in of_ranks]
        summed = calls.all_reduce_coalesced(own, "sum", name)
        gathered = calls.all_gather_into_tensor_coalesced(own, self.size, name)
        flat = [*map(torch.flatten, of_ranks)]
        scattered = calls.reduce_scatter_tensor_coalesced(flat, "sum", self.size, name)
        largest = calls.reduce_scatter_tensor_coalesced(flat, "max", self.size, name)
        for number, rows in enumerate(of_ranks):
            self.same(calls.wait_tensor(summed[number]), combine(list(rows), ReduceOp.SUM))
            self.same(calls.wait_tensor(gathered[number]), rows)
            self.same(calls.wait_tensor(scattered[number]), self.size * rows[self.rank])
            self.same(calls.wait_tensor(largest[number]), rows[self.rank])

    def several_under_way(self) -> None:
        self.mine()
        self.other.copy_(self.grid[0][self.rank])
        self.whole.fill_(-1)
        third = self.all[self.rank].clone()
        begun: list[Any] = [
            dist.all_reduce(self.own, group=self.group, async_op=True),
            dist.broadcast(self.other, group=self.group, group_src=self.size - 1, async_op=True),
            all_gather_single(self.whole, third, self.group, async_op=True),
            dist.barrier(self.group, async_op=True),
        ]
        for number in (2, 0, 3, 1):
            begun[number].wait()
        self.same(self.own, combine(self.all, ReduceOp.SUM))
        self.same(self.other, self.grid[0][self.size - 1])
        self.same(self.whole, torch.stack(self.all))

    def messages(self) -> None:
        if self.size == 1:
            return
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for sends in (self.rank % 2 == 0, self.rank % 2 == 1):
            if sends:
                dist.send(self.mine(), group=self.group, group_dst=after)
            else:
                dist.recv(self.other.fill_(-1), group=self.group, group_src=before)
                self.same(self.other, self.all[before])
        numbered = [[self.all[rank] + number for number in range(3)] for rank in (before, self.rank)]
        received = [torch.full_like(tensor, -1) for tensor in numbered[0]]
        begun: list[Any] = [dist.irecv(tensor, group=self.group, group_src=before) for tensor in received]
        begun += [dist.isend(tensor, group=self.group, group_dst=after) for tensor in numbered[1]]
        for number in (4, 1, 5, 3, 0, 2):
            begun[number].wait()
        for tensor, expected in zip(received, numbered[0], strict=True):
            self.same(tensor, expected)
        calls = [
            dist.P2POp(dist.irecv, self.other.fill_(-1), group=self.group, group_peer=before),
            dist.P2POp(dist.isend, self.mine(), group=self.group, group_peer=after),
        ]
        for pending in dist.batch_isend_irecv(calls):
            pending.wait()
        self.same(self.other, self.all[before])

    def every_call(self) -> list[int]:
        self.all_reduce()
        self.to_and_from_a_root()
        self.all_gather()
        self.reduce_scatter()
        self.all_to_all()
        self.coalesced()
        self.several_under_way()
        self.messages()
        return self.found


def compare(rank: int, world_size: int, port: int, transport: TransportName) -> list[list[int]]:
    """Compare in the group of all ranks and in others; what the ranks of each group have in the end."""
    found, everyone = [], list(range(world_size))
    if world_size in (1, 3):
        cases = [(everyone, SIZES, DTYPES[:1]), (everyone, SIZES[:-1], DTYPES[1:])]
        cases += [(everyone[::2], [0, 1000, 300_001], DTYPES[:1])]
    else:
        cases = [(everyone, [3, 1000], DTYPES[:1]), (everyone[1::2], [0, 1000], DTYPES[1:])]
    memory = (False, True) if transport == "shared" else (False,)
    with process_group(rank, world_size, port, options=Options(transport=transport)) as context:
        for ranks, sizes, dtypes in cases:
            group = None if ranks == everyone else dist.new_group(ranks)
            of_group: list[int] = []
            if rank in ranks:
                for dtype, elements, is_shared in itertools.product(dtypes, sizes, memory):
                    of_group += Compared(group, ranks, elements, dtype, is_shared).every_call()
            found.append(of_group)
        assert context.shares_memory == (transport == "shared" and world_size > 1)
        parts = torch.zeros(world_size, 9)
        started: Any = reduce_scatter_single(torch.empty(9), parts, async_op=True)
        started.wait()
        assert started.buffer_bytes == (parts.nbytes if transport == "gloo" and world_size > 1 else 0)
    return found


@pytest.mark.parametrize("transport", ["gloo", "shared"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_call_gives_what_is_computed_by_hand(world_size: int, transport: TransportName) -> None:
    by_rank = run_ranks(world_size, compare, world_size, free_port(), transport)
    assert by_rank[0][0]
    for results in zip(*by_rank, strict=True):
        assert len({tuple(found) for found in results if found}) <= 1, "all ranks have the same bits"
