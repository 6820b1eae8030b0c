"""Collectives of ranks on one host: in place where their tensors lie in shared memory, else in pieces through slots.

`OneHost.empty` makes tensors in shared memory. The collectives in place follow the class; those through slots, of
tensors at any address, are in slots.py. Both are written in the turns of `SharedCollective`.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.context import SMALLEST_SHARED_BYTES
from distlab.comm.transports import slots
from distlab.comm.transports.memory import ELSEWHERE, SharedCollective, SharedMemory, call_of
from distlab.comm.transports.sums import CHUNK_BYTES, add_in_order, combine_in_order, is_known
from distlab.comm.transports.transport import Carried, Members, MemoryTransport, Op, is_overlapping
from distlab.comm.waits import Wait


class OneHost(MemoryTransport):
    """Ranks that are all on one host.

    Args:
        library: torch's group of the ranks, over which they meet.
    """

    smallest_bytes = SMALLEST_SHARED_BYTES

    def __init__(self, members: Members, takes_all: bool, library: Any) -> None:
        super().__init__(members, takes_all)
        self._memory = SharedMemory(library, members.ranks, members.rank, members.context.has_own_core)

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        return self._memory.allocate(elements, dtype)

    def empty(self, elements: int, like: Tensor) -> Tensor | None:
        return None if is_overlapping.get() else super().empty(elements, like)

    def close(self) -> None:
        self._memory.close()

    def shares(self, tensor: Tensor) -> bool:
        return self._memory.address_of(tensor) != ELSEWHERE

    def held_back(self) -> list[Wait]:
        begun = list(self._memory.not_done)
        return [one.named for one in begun if one.is_held_back and one.named is not None]

    def _has_slots(self, tensor: Tensor, at_any_size: bool = False) -> bool:
        """Return whether pieces of a tensor travel through slots, which are made for the first of them."""
        if is_overlapping.get() or not tensor.is_cpu or not (at_any_size or self.is_worth_it(tensor.nbytes, tensor)):
            return False
        if not self._memory.has_slots():
            self.together(self._memory.make_slots)
        return self._memory.has_slots()

    def _carry(
        self, name: str, own: Tensor, through_slots: Iterator[None], in_place: Iterator[None] | None = None
    ) -> Carried | None:
        """Start the collective `name` of a tensor: in place if it lies in shared memory, else through the slots."""
        address = self._memory.address_of(own) if in_place else ELSEWHERE
        if in_place and address != ELSEWHERE:
            turns = in_place
        elif self._has_slots(own):
            turns = through_slots
        else:
            return None
        return Carried(SharedCollective(self._memory, address, call_of(name, own), turns))

    def all_reduce(self, tensor: Tensor, op: Op) -> Carried | None:
        if not is_known(op):
            return None
        name, memory, own = f"all_reduce by {op.name}", self._memory, tensor.view(-1)
        return self._carry(name, own, slots.all_reduce(memory, own, op), all_reduce_in_place(memory, own, op))

    def broadcast(self, tensor: Tensor, source: int) -> Carried | None:
        name, memory, own = f"broadcast from rank {self.members.ranks[source]}", self._memory, tensor.view(-1)
        return self._carry(name, own, slots.broadcast(memory, own, source), broadcast_in_place(memory, own, source))

    def all_gather(self, output: Tensor, own: Tensor) -> Carried | None:
        return self.all_gather_list(list(output.view(self.members.size, -1).unbind()), own)

    def all_gather_list(self, rows: list[Tensor], own: Tensor) -> Carried | None:
        if any(row.numel() != own.numel() for row in rows):
            return None
        memory, flat, own = self._memory, [row.view(-1) for row in rows], own.view(-1)
        in_place = all_gather_in_place(memory, flat, own)
        return self._carry("all_gather", own, slots.all_gather(memory, flat, own), in_place)

    def reduce_scatter(self, own: Tensor, parts: Tensor, op: Op) -> Carried | None:
        if op != ReduceOp.SUM:
            return None
        memory, own = self._memory, own.view(-1)
        in_place = reduce_scatter_in_place(memory, own, parts)
        return self._carry("reduce_scatter", parts, slots.reduce_scatter(memory, own, parts), in_place)

    def all_to_all(
        self, output: Tensor, own: Tensor, output_sizes: Sequence[int], own_sizes: Sequence[int]
    ) -> Carried | None:
        size, memory = self.members.size, self._memory
        if not output_sizes and not own_sizes:
            return self._carry("all_to_all", own, slots.all_to_all(memory, output.view(size, -1), own.view(size, -1)))
        # Parts of different sizes are not as many bytes on all ranks, so these travel here whatever their size.
        if not self._has_slots(own, at_any_size=True):
            return None
        received, sent = (
            tensor.split(list(sizes) or [len(tensor) // size] * size)
            for tensor, sizes in ((output, output_sizes), (own, own_sizes))
        )
        turns, call = slots.uneven_all_to_all(memory, received, sent), f"all_to_all with sizes of {own.dtype}"
        return Carried(SharedCollective(memory, ELSEWHERE, call, turns))


# In place: each rank's tensor lies in its part of the memory, perhaps elsewhere in it than the tensors of other ranks.


def _tensors_of_all(memory: SharedMemory, own: Tensor) -> Generator[None, None, list[Tensor]]:
    """Take a turn, and return the tensors of all ranks, which now are all there: (elements,) each."""
    yield
    return memory.parts(own)


def all_reduce_in_place(memory: SharedMemory, own: Tensor, op: Op, *, all_get_it: bool = True) -> Iterator[None]:
    """Combine each rank's tensor, in place, over the ranks in their order, ((x0 + x1) + x2) + …

    So every rank has the same sums, in every run; the average is the sum divided by the number of ranks. Each rank
    combines a share of the elements.

    Args:
        all_get_it: whether all ranks get the result, or only the first.
    """
    parts = yield from _tensors_of_all(memory, own)
    item_bytes = own.element_size()
    line = 64 // item_bytes  # elements: ranks that wrote to the same cache line would slow each other
    length = -(-own.numel() // (memory.size * line)) * line
    start = memory.rank * length
    for chunks in zip(*(part[start : start + length].split(CHUNK_BYTES // item_bytes) for part in parts), strict=True):
        result, *others = chunks
        combine_in_order(chunks, op, result)
        if op == ReduceOp.AVG:
            result.div_(memory.size)
        for other in others if all_get_it else ():
            other.copy_(result)
    yield  # all ranks have combined their shares


def broadcast_in_place(memory: SharedMemory, own: Tensor, source: int) -> Iterator[None]:
    """Copy the source's tensor into every rank's."""
    parts = yield from _tensors_of_all(memory, own)
    if memory.rank != source:
        parts[memory.rank].copy_(parts[source])
    yield  # all ranks have their copies


def all_gather_in_place(memory: SharedMemory, rows: Sequence[Tensor], own: Tensor) -> Iterator[None]:
    """Copy each rank's tensor into every rank's `rows`, (elements,) each, some of which may be these tensors."""
    parts = yield from _tensors_of_all(memory, own)
    for row, part in zip(rows, parts, strict=True):
        if row.data_ptr() != part.data_ptr():
            row.copy_(part)
    yield  # all ranks have their copies


def reduce_scatter_in_place(memory: SharedMemory, own: Tensor, parts: Tensor) -> Iterator[None]:
    """Add up each rank's `parts` (ranks, elements); every rank gets its row of the sum in `own`; see `add_in_order`."""
    of_all = yield from _tensors_of_all(memory, parts)
    add_in_order([tensor.view(memory.size, -1)[memory.rank] for tensor in of_all], own)
    yield  # all ranks have their rows
