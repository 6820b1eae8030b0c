"""Collectives in memory that the ranks of one host share, and the choice of the tensors that travel there.

Tensors that `OneHost.empty` has made are communicated in place; others pass through slots, piece by piece.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.context import SMALLEST_SHARED_BYTES, NotShared
from distlab.comm.transports import in_place, slots
from distlab.comm.transports.memory import SharedMemory
from distlab.comm.transports.sums import is_known
from distlab.comm.transports.transport import Carried, Members, Op, Transport, is_overlapping
from distlab.comm.waits import Wait

MemoryT = TypeVar("MemoryT")
MadeT = TypeVar("MadeT")


class MemoryTransport(Transport, ABC, Generic[MemoryT]):
    """A transport that makes memory on the first request, if the ranks can share it.

    Args:
        members: the ranks; some of them are on one host.
        takes_all: whether tensors also travel here that are too small to be worth it.
    """

    smallest_bytes: int  # of tensors that are worth it

    def __init__(self, members: Members, takes_all: bool) -> None:
        self.members, self._takes_all = members, takes_all
        self._memory: MemoryT | None = None
        self._can_make = True

    @abstractmethod
    def make_memory(self) -> MemoryT:
        """Make the memory; all ranks of the group call it together."""

    def together(self, make: Callable[[MemoryT], MadeT]) -> MadeT | None:
        """Call `make` with the memory; None if these ranks cannot share it. All ranks of the group call it together.

        Raises:
            InputError: the transport is "shared", and these ranks cannot share memory.
            TrafficError: a rank does not take part.
        """
        context = self.members.context
        if not self._can_make:
            return None
        try:
            with context.waits.during(Wait("shared memory", "other", self.members.others)):
                if self._memory is None:
                    self._memory = self.make_memory()
                made = make(self._memory)
        except NotShared as error:
            context.share_less(error, is_first=any(here[0] == context.rank for here in self.members.by_host))
            self._can_make = False  # memory that was made before stays shared
            return None
        context.shares_memory = True
        return made

    @property
    def limit(self) -> timedelta:
        """The longest time that a wait may take."""
        return timedelta(seconds=self.members.context.waits.timeout_seconds)

    def is_worth_it(self, size_bytes: int, like: Tensor) -> bool:
        return like.is_cpu and (self._takes_all or size_bytes >= self.smallest_bytes)

    def empty(self, elements: int, like: Tensor, overlaps: bool) -> Tensor | None:
        """Return zeros (elements,) in memory that the ranks share, or None; see `distlab.comm.group.empty`."""
        if not self.is_worth_it(elements * like.itemsize, like):
            return None
        return self.together(lambda memory: self.allocate(memory, elements, like.dtype))

    def shares(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in memory of one host that all ranks of the group share."""
        return False

    def held_back(self) -> list[Wait]:
        """Return the collectives of which this rank has yet to compute its part. Other threads may call this."""
        return []

    @abstractmethod
    def allocate(self, memory: MemoryT, elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeros (elements,) in this rank's part of the memory."""


class OneHost(MemoryTransport[SharedMemory]):
    """Ranks that are all on one host.

    Args:
        library: torch's group of the ranks, over which they meet.
    """

    smallest_bytes = SMALLEST_SHARED_BYTES

    def __init__(self, members: Members, takes_all: bool, library: Any) -> None:
        super().__init__(members, takes_all)
        self._library = library

    def make_memory(self) -> SharedMemory:
        members = self.members
        return SharedMemory(self._library, members.rank, members.size, members.context.has_own_core)

    def allocate(self, memory: SharedMemory, elements: int, dtype: torch.dtype) -> Tensor:
        return memory.allocate(elements, dtype, self.limit)

    def empty(self, elements: int, like: Tensor, overlaps: bool) -> Tensor | None:
        return None if overlaps else super().empty(elements, like, overlaps)  # nothing happens before all ranks wait

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory = None

    def shares(self, tensor: Tensor) -> bool:
        return self._part_of(tensor) is not None

    def held_back(self) -> list[Wait]:
        begun = list(self._memory.not_done) if self._memory else []
        return [one.named for one in begun if one.is_held_back and one.named is not None]

    def _part_of(self, tensor: Tensor) -> SharedMemory | None:
        """Return the memory if a tensor lies in this rank's part of it."""
        return self._memory if self._memory and self._memory.place_of(tensor) else None

    def _slots(self, tensor: Tensor) -> SharedMemory | None:
        """Return the memory, with slots for the pieces of a tensor; None if the tensor does not travel here."""
        return self._slots_of_any_size(tensor) if self.is_worth_it(tensor.nbytes, tensor) else None

    def _slots_of_any_size(self, tensor: Tensor) -> SharedMemory | None:
        """Return the memory, with slots, also for a tensor whose size the other ranks do not know."""
        if is_overlapping.get() or not tensor.is_cpu:
            return None
        if self._memory is None or not self._memory.has_slots():
            self.together(lambda memory: memory.make_slots(self.limit))
        return self._memory if self._memory and self._memory.has_slots() else None

    def all_reduce(self, tensor: Tensor, op: Op) -> Carried | None:
        if not is_known(op):
            return None
        if memory := self._part_of(tensor):
            return Carried(in_place.AllReduce(memory, tensor, op))
        if memory := self._slots(tensor):
            return Carried(slots.all_reduce(memory, tensor.view(-1), op))
        return None

    def broadcast(self, tensor: Tensor, source: int) -> Carried | None:
        if memory := self._part_of(tensor):
            return Carried(in_place.Broadcast(memory, tensor, source))
        if memory := self._slots(tensor):
            return Carried(slots.broadcast(memory, tensor.view(-1), source))
        return None

    def all_gather(self, output: Tensor, own: Tensor) -> Carried | None:
        rows = output.view(self.members.size, -1)
        if memory := self._part_of(own):
            return Carried(in_place.AllGather(memory, own, rows))
        return self.all_gather_list(list(rows.unbind()), own)

    def all_gather_list(self, rows: list[Tensor], own: Tensor) -> Carried | None:
        is_even = all(row.numel() == own.numel() for row in rows)
        if is_even and (memory := self._slots(own)):
            return Carried(slots.all_gather(memory, [row.view(-1) for row in rows], own.view(-1)))
        return None

    def reduce_scatter(self, own: Tensor, parts: Tensor, op: Op) -> Carried | None:
        if op != ReduceOp.SUM:
            return None
        if memory := self._part_of(parts):
            return Carried(in_place.ReduceScatter(memory, parts, own))
        if memory := self._slots(parts):
            return Carried(slots.reduce_scatter(memory, own.view(-1), parts))
        return None

    def received_bytes(self, parts: Tensor) -> int | None:
        return 0 if self._part_of(parts) or self._slots(parts) else None

    def all_to_all(
        self, output: Tensor, own: Tensor, output_sizes: Sequence[int], own_sizes: Sequence[int]
    ) -> Carried | None:
        size, is_even = self.members.size, not output_sizes and not own_sizes
        # Only parts of one size are as many bytes on all ranks: others travel here whatever their size.
        memory = self._slots(own) if is_even else self._slots_of_any_size(own)
        if memory is None:
            return None
        if is_even:
            return Carried(slots.all_to_all(memory, output.view(size, -1), own.view(size, -1)))
        received, sent = (
            tensor.split(list(sizes) or [len(tensor) // size] * size)
            for tensor, sizes in ((output, output_sizes), (own, own_sizes))
        )
        return Carried(slots.UnevenAllToAll(memory, received, sent))
