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
from distlab.comm.transports.collectives import Call, Collectives, InPlace, combine_share
from distlab.comm.transports.memory import Address, MemoryTransport, SharedMemory
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
        self._memory = SharedMemory(library, members.rank, members.size, lambda: members.context.has_own_core)
        self._collectives = Collectives(self._memory, members.ranks)

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        return self._memory.allocate(elements, dtype, self.limit)

    def empty(self, elements: int, like: Tensor, overlaps: bool) -> Tensor | None:
        return None if overlaps else super().empty(elements, like, overlaps)  # nothing happens before all ranks wait

    def close(self) -> None:
        self._memory.close()

    def shares(self, tensor: Tensor) -> bool:
        return self._memory.address_of(tensor) is not None

    def held_back(self) -> list[Wait]:
        begun = list(self._collectives.not_done)
        return [one.named for one in begun if one.is_held_back and one.named is not None]

    def _in_place(
        self, operation: str, address: Address, own: Tensor, combine: Callable[[list[Tensor]], object]
    ) -> Carried:
        self._make_room()
        return Carried(InPlace(self._collectives, address, own, combine, operation))

    def _through_slots(self, operation: str, own: Tensor, turns: Iterator[int], is_even: bool = True) -> Carried:
        self._make_room()
        call = Call(operation, own.dtype, own.numel() * is_even)
        return Carried(slots.ThroughSlots(self._collectives, call, turns))

    def _make_room(self) -> None:
        self._collectives.make_room(self.members.context.waits.timeout_seconds)

    def _has_slots(self, tensor: Tensor) -> bool:
        """Return whether there are slots for the pieces of a tensor, which are made for the first of them."""
        return self.is_worth_it(tensor.nbytes, tensor) and self._has_slots_for_any_size(tensor)

    def _has_slots_for_any_size(self, tensor: Tensor) -> bool:
        """Return the same, also for a tensor whose size the other ranks do not know."""
        if is_overlapping.get() or not tensor.is_cpu:
            return False
        if not self._memory.has_slots():
            self.together(lambda: self._memory.make_slots(self.limit))
        return self._memory.has_slots()

    def all_reduce(self, tensor: Tensor, op: Op) -> Carried | None:
        if not is_known(op):
            return None
        operation = f"all_reduce by {op.name}"
        if address := self._memory.address_of(tensor):
            return self._in_place(operation, address, tensor, lambda parts: combine_share(parts, self._memory.rank, op))
        if self._has_slots(tensor):
            return self._through_slots(operation, tensor, slots.all_reduce(self._memory, tensor.view(-1), op))
        return None

    def broadcast(self, tensor: Tensor, source: int) -> Carried | None:
        operation = f"broadcast from rank {self.members.ranks[source]}"
        if address := self._memory.address_of(tensor):
            return self._in_place(operation, address, tensor, lambda parts: copy_from(parts, source, self._memory.rank))
        if self._has_slots(tensor):
            return self._through_slots(operation, tensor, slots.broadcast(self._memory, tensor.view(-1), source))
        return None

    def all_gather(self, output: Tensor, own: Tensor) -> Carried | None:
        rows = output.view(self.members.size, -1)
        if address := self._memory.address_of(own):
            return self._in_place("all_gather", address, own, lambda parts: copy_all(parts, rows))
        return self.all_gather_list(list(rows.unbind()), own)

    def all_gather_list(self, rows: list[Tensor], own: Tensor) -> Carried | None:
        if all(row.numel() == own.numel() for row in rows) and self._has_slots(own):
            turns = slots.all_gather(self._memory, [row.view(-1) for row in rows], own.view(-1))
            return self._through_slots("all_gather", own, turns)
        return None

    def reduce_scatter(self, own: Tensor, parts: Tensor, op: Op) -> Carried | None:
        if op != ReduceOp.SUM:
            return None
        if address := self._memory.address_of(parts):
            add = partial(add_row, row=self._memory.rank, total=own)
            return self._in_place("reduce_scatter", address, parts, add)
        if self._has_slots(parts):
            turns = slots.reduce_scatter(self._memory, own.view(-1), parts)
            return self._through_slots("reduce_scatter", parts, turns)
        return None

    def received_bytes(self, parts: Tensor) -> int | None:
        return 0 if self.shares(parts) or self._has_slots(parts) else None

    def all_to_all(
        self, output: Tensor, own: Tensor, output_sizes: Sequence[int], own_sizes: Sequence[int]
    ) -> Carried | None:
        size, memory = self.members.size, self._memory
        # Only parts of one size are as many bytes on all ranks: others travel here whatever their size.
        if not output_sizes and not own_sizes:
            if not self._has_slots(own):
                return None
            turns = slots.all_to_all(memory, output.view(size, -1), own.view(size, -1))
            return self._through_slots("all_to_all", own, turns)
        if not self._has_slots_for_any_size(own):
            return None
        received, sent = (
            tensor.split(list(sizes) or [len(tensor) // size] * size)
            for tensor, sizes in ((output, output_sizes), (own, own_sizes))
        )
        turns = slots.uneven_all_to_all(memory, received, sent)
        return self._through_slots("all_to_all with sizes", own, turns, is_even=False)
