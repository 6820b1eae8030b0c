"""The choice of how the tensors of ranks on one host travel: in place, in pieces through slots, or not here.

Tensors that `OneHost.empty` has made are communicated in place; others pass through slots, piece by piece.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.context import SMALLEST_SHARED_BYTES
from distlab.comm.transports import slots
from distlab.comm.transports.collectives import SharedCollective, combine_share, in_place
from distlab.comm.transports.memory import MemoryTransport, SharedMemory
from distlab.comm.transports.sums import add_row, copy_all, copy_from, is_known
from distlab.comm.transports.transport import Carried, Members, Op, is_overlapping
from distlab.comm.waits import Wait


class OneHost(MemoryTransport):
    """Ranks that are all on one host.

    Args:
        library: torch's group of the ranks, over which they meet.
    """

    smallest_bytes = SMALLEST_SHARED_BYTES

    def __init__(self, members: Members, takes_all: bool, library: Any) -> None:
        super().__init__(members, takes_all)
        self._memory = SharedMemory(library, members.ranks, members.rank, lambda: members.context.has_own_core)

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        return self._memory.allocate(elements, dtype, self.limit)

    def empty(self, elements: int, like: Tensor, overlaps: bool) -> Tensor | None:
        return None if overlaps else super().empty(elements, like, overlaps)  # nothing happens before all ranks wait

    def close(self) -> None:
        self._memory.close()

    def shares(self, tensor: Tensor) -> bool:
        return self._memory.address_of(tensor) is not None

    def held_back(self) -> list[Wait]:
        begun = list(self._memory.not_done)
        return [one.named for one in begun if one.is_held_back and one.named is not None]

    def _has_slots(self, tensor: Tensor, is_even: bool = True) -> bool:
        """Return whether pieces of a tensor travel through slots, which are made for the first of them.

        A tensor whose size the other ranks may not know (`is_even`) does, whatever its size.
        """
        if is_overlapping.get() or not tensor.is_cpu or (is_even and not self.is_worth_it(tensor.nbytes, tensor)):
            return False
        if not self._memory.has_slots():
            self.together(lambda: self._memory.make_slots(self.limit))
        return self._memory.has_slots()

    def _carry(
        self,
        kind: str,
        number: int,
        own: Tensor,
        turns: Iterator[None],
        combine: Callable[[list[Tensor]], object] | None = None,
        is_even: bool = True,
    ) -> Carried | None:
        """Start a collective, of a tensor in shared memory by `combine` in place, else by `turns` through the slots."""
        address = self._memory.address_of(own) if combine else None
        if address and combine:
            turns = in_place(self._memory, own, combine)
        elif not self._has_slots(own, is_even):
            return None
        return Carried(SharedCollective(self._memory, kind, number, own, address, turns, is_even))

    def all_reduce(self, tensor: Tensor, op: Op) -> Carried | None:
        if not is_known(op):
            return None
        add, memory = partial(combine_share, rank=self._memory.rank, op=op), self._memory
        return self._carry("all_reduce by", op.value, tensor, slots.all_reduce(memory, tensor.view(-1), op), add)

    def broadcast(self, tensor: Tensor, source: int) -> Carried | None:
        copy, turns = partial(copy_from, source=source, rank=self._memory.rank), slots.broadcast
        number = self.members.ranks[source]
        return self._carry("broadcast from rank", number, tensor, turns(self._memory, tensor.view(-1), source), copy)

    def all_gather(self, output: Tensor, own: Tensor) -> Carried | None:
        return self.all_gather_list(list(output.view(self.members.size, -1).unbind()), own)

    def all_gather_list(self, rows: list[Tensor], own: Tensor) -> Carried | None:
        if any(row.numel() != own.numel() for row in rows):
            return None
        flat = [row.view(-1) for row in rows]
        turns = slots.all_gather(self._memory, flat, own.view(-1))
        return self._carry("all_gather", 0, own, turns, partial(copy_all, rows=flat))

    def reduce_scatter(self, own: Tensor, parts: Tensor, op: Op) -> Carried | None:
        if op != ReduceOp.SUM:
            return None
        turns = slots.reduce_scatter(self._memory, own.view(-1), parts)
        return self._carry("reduce_scatter", 0, parts, turns, partial(add_row, row=self._memory.rank, total=own))

    def received_bytes(self, parts: Tensor) -> int | None:
        return 0 if self.shares(parts) or self._has_slots(parts) else None

    def all_to_all(
        self, output: Tensor, own: Tensor, output_sizes: Sequence[int], own_sizes: Sequence[int]
    ) -> Carried | None:
        size, memory = self.members.size, self._memory
        # Only parts of one size are as many bytes on all ranks: others travel here whatever their size.
        if not output_sizes and not own_sizes:
            turns = slots.all_to_all(memory, output.view(size, -1), own.view(size, -1))
            return self._carry("all_to_all", 0, own, turns)
        received, sent = (
            tensor.split(list(sizes) or [len(tensor) // size] * size)
            for tensor, sizes in ((output, output_sizes), (own, own_sizes))
        )
        turns = slots.uneven_all_to_all(memory, received, sent)
        return self._carry("all_to_all with sizes", 0, own, turns, is_even=False)
