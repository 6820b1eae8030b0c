"""Memory that the ranks of a group share, in which each of them has a part, and the collectives on it.

The data never leaves memory. The signals "my part is there" and "my share is done" are bytes in pipes, so a wait ends
as any other does: with the signal, at the deadline, or when the other rank dies.
"""

import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.mappings import Mapping, Offer, accept, no_offer, not_shared
from distlab.comm.signals import Channel, Signal, SignalTimeout, close_all
from distlab.comm.waits import Wait

CHUNK_BYTES = 256 * 1024  # added up at a time, so that a chunk is written back to all parts while it is in the caches
READY, DONE, TURN = 1, 2, 3  # signals
SLOT_BYTES = 1 << 20  # of the two that each rank has for tensors that lie elsewhere; it stays in the caches
# Tensor-parallel ranks wait for each other every few milliseconds. Waking a thread up takes a tenth of one, and a core
# that has been idle is slow at first.
SPIN_SECONDS = 5e-4
COMBINE: dict[ReduceOp.RedOpType, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}


class SharedMemory:
    """What the ranks of a process group share: mappings, and the collectives on them, which run in their order.

    Args:
        group: torch's, over which they meet; its ranks are on one host, or `allocate` raises.
        rank: of this one in the group.
        size: number of ranks.
        has_own_core: whether no other rank needs the core of one that waits, so that it may spin.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, has_own_core: bool) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.begun = 0  # collectives
        self.in_place = 0  # of these, those of parts of the memory; each rank sends READY and DONE once for each
        self.asked_for = 0  # this rank has done its share up to this one, or is about to
        self.not_done: deque[SharedCollective] = deque()  # this rank's share is not done
        self._mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()  # one goes with the last tensor in it
        self._channels: list[Channel] = []  # to other ranks, by which they signal; made with the first mapping
        passes_on = self.rank == 0 and self.size > 2
        spin_seconds = SPIN_SECONDS if has_own_core else 0.0
        self.ready, self.done, self.turn = (
            Signal(signal, self._channels, passes_on, spin_seconds) for signal in (READY, DONE, TURN)
        )
        self.turns = 0  # of passing pieces of tensors through the slots
        self._slots: list[list[Tensor]] = []  # two, each by rank: (SLOT_BYTES,) uint8

    def has_slots(self) -> bool:
        return bool(self._slots)

    def make_slots(self, timeout: timedelta) -> None:
        """Make the slots through which tensors pass that lie elsewhere; all ranks call it together.

        Raises:
            NotShared, RuntimeError: as `allocate`.
        """
        own = self.allocate(2 * SLOT_BYTES, torch.uint8, timeout)
        parts = self.parts_like(own)
        assert parts is not None
        self._slots = [[part[start : start + SLOT_BYTES] for part in parts] for start in (0, SLOT_BYTES)]

    def next_slots(self) -> list[Tensor]:
        """Every rank's slot for the next turn, (SLOT_BYTES,) uint8 each."""
        self.turns += 1
        return self._slots[self.turns % 2]

    def close(self) -> None:
        """Close the channels; the memory goes with the last tensor in it."""
        close_all(self._channels)
        self._channels.clear()
        self._slots.clear()

    def allocate(self, elements: int, dtype: torch.dtype, timeout: timedelta) -> Tensor:
        """Zeros (elements,) in this rank's part of a new mapping; all ranks of the group call it together.

        Raises:
            NotShared: on all ranks, if one of them cannot have it.
            RuntimeError: of gloo's; a rank did not take part.
        """
        pipes_to = 0 if self._channels else self.size - 1
        room_bytes = elements * dtype.itemsize
        offer = Offer(room_bytes, self.size, pipes_to, huge=True) if self.rank == 0 else None
        opened = offer.channels if offer else []
        with ExitStack() as if_it_fails:
            if_it_fails.callback(close_all, opened)
            try:
                numbers = torch.tensor(offer.numbers if offer else no_offer(pipes_to))
                self.group.broadcast([numbers], from_rank_0(timeout)).wait()
                pipes = self.rank - 1 if pipes_to and self.rank else None
                problem, mapping, channels = accept(numbers.tolist(), range(self.rank, self.rank + 1), pipes)
                opened += channels
                verdicts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
                self.group.allgather([verdicts], [torch.tensor([problem])]).wait(timeout)
            finally:
                if offer is not None:
                    offer.withdraw()
            found = next((int(code) for code in verdicts if code), problem)
            if found or mapping is None:
                raise not_shared(found, self.size * room_bytes)
            if_it_fails.pop_all()
        self._channels += opened
        self._mappings.add(mapping)
        return mapping.part(self.rank, torch.empty(elements, dtype=dtype, device="meta"))

    def parts_like(self, tensor: Tensor) -> list[Tensor] | None:
        """If a tensor (any shape, contiguous) is in this rank's part, what is there in each rank's; else None.

        That is (elements,) each.
        """
        at = tensor.data_ptr()
        for mapping in self._mappings:
            offset = at - mapping.address - self.rank * mapping.part_bytes
            if 0 <= offset < mapping.part_bytes:
                return [mapping.part(rank, tensor, offset) for rank in range(self.size)]
        return None


class SharedWork(ABC):
    """Something in shared memory that has begun, and is done by the thread that waits for it."""

    def wait(self, timeout: timedelta) -> None:
        """Return when it is done; `RuntimeError` as of `Channel.wait` if another rank fails."""
        self.advance(time.perf_counter() + timeout.total_seconds())

    def is_done(self) -> bool:
        """Do what needs no wait for other ranks, and return whether that was all."""
        try:
            self.advance(deadline=0.0)
        except SignalTimeout:
            return False
        return True

    @abstractmethod
    def advance(self, deadline: float) -> None:
        """Do what is left, or what can be done by the deadline; `RuntimeError` as of `wait`."""


class SharedCollective(SharedWork):
    """A collective in shared memory; it has begun when it is made.

    All of it is done in `wait`, by the thread that calls it: a thread beside it would need a core. The collectives of a
    group are done in the order in which they have begun.

    Attributes:
        named: its name, if it has one.
    """

    named: Wait | None = None

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        memory.begun += 1
        self._number = memory.begun
        memory.not_done.append(self)

    @property
    def is_held_back(self) -> bool:
        """Whether this rank has yet to do its share, without which no rank gets the result."""
        return self._number > self._memory.asked_for

    def is_done(self) -> bool:
        asked_for = self._memory.asked_for
        is_done = super().is_done()
        if not is_done and self in self._memory.not_done:  # this rank may compute for long before it comes again
            self._memory.asked_for = asked_for
        return is_done

    def advance(self, deadline: float) -> None:
        memory = self._memory
        memory.asked_for = max(memory.asked_for, self._number)
        while memory.not_done and memory.not_done[0]._number <= self._number:
            memory.not_done[0]._do_share(deadline)
            memory.not_done.popleft()
        self._wait_for_others(deadline)

    @abstractmethod
    def _do_share(self, deadline: float) -> None:
        """Wait for the others' parts, and do this rank's share; after `SignalTimeout`, the rest of it."""

    def _wait_for_others(self, deadline: float) -> None:
        """Wait until the other ranks have done their shares, if this rank needs them."""


class InPlace(SharedCollective):
    """A collective of tensors that lie in each rank's part of the memory; nothing is copied but the result."""

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__(memory)
        memory.in_place += 1
        self._times = memory.in_place
        memory.ready.send()

    def _do_share(self, deadline: float) -> None:
        self._memory.ready.wait(self._times, deadline)
        self._combine()
        self._memory.done.send()

    def _wait_for_others(self, deadline: float) -> None:
        self._memory.done.wait(self._times, deadline)

    @abstractmethod
    def _combine(self) -> None:
        """Compute this rank's share from the parts of all ranks."""


class ThroughSlots(SharedCollective):
    """A collective of tensors that lie anywhere, piece by piece through slots that stay in the caches.

    In each turn, every rank copies a piece of its own into its slot, and reads what it needs from all slots. Two slots
    take turns: a rank writes to one again when all ranks have come to the turn after, and so have read it.

    Args:
        turns: number of pieces.
        put: (turn, own slot) copies a piece of this rank's.
        take: (turn, all slots) reads what this rank needs, by rank.
    """

    def __init__(
        self,
        memory: SharedMemory,
        turns: int,
        put: Callable[[int, Tensor], object],
        take: Callable[[int, list[Tensor]], object],
    ) -> None:
        super().__init__(memory)
        self._turns, self._put, self._take = turns, put, take
        self._turn, self._slots = 0, list[Tensor]()  # of the turn, once this rank has put its piece there

    def _do_share(self, deadline: float) -> None:
        memory = self._memory
        while self._turn < self._turns:
            if not self._slots:
                self._slots = memory.next_slots()
                self._put(self._turn, self._slots[memory.rank])
                memory.turn.send()
            memory.turn.wait(memory.turns, deadline)
            self._take(self._turn, self._slots)
            self._turn, self._slots = self._turn + 1, []


class SharedReduce(InPlace):
    """A combination of what lies at the same place in each rank's part, which the first part gets.

    Each rank combines its share of the elements, over the ranks in their order, ((x0 + x1) + x2) + …
    """

    def __init__(self, memory: SharedMemory, parts: list[Tensor], op: ReduceOp.RedOpType) -> None:
        self._op = op
        elements, item_bytes = parts[0].numel(), parts[0].element_size()
        line = max(1, 64 // item_bytes)  # elements: ranks that wrote to one line of the caches would slow each other
        length = -(-elements // (memory.size * line)) * line
        start = min(elements, memory.rank * length)
        self._share = [part[start : start + length] for part in parts]
        super().__init__(memory)

    def _combine(self) -> None:
        in_a_chunk = max(1, CHUNK_BYTES // self._share[0].element_size())
        for parts in zip(*(share.split(in_a_chunk) for share in self._share), strict=True):
            result, *others = parts
            combine_in_order(parts, self._op, result)
            self._take(result, others)

    def _take(self, result: Tensor, others: list[Tensor]) -> None:
        """Called for each chunk, with the result, which is in the first part, and the same chunk of the others."""


class SharedAllReduce(SharedReduce):
    """A combination of what lies at the same place in each rank's part, which all parts get.

    So every rank has the same sums, in every run; the average is the sum divided by the ranks.
    """

    def _take(self, result: Tensor, others: list[Tensor]) -> None:
        if self._op == ReduceOp.AVG:
            result.div_(self._memory.size)
        for other in others:
            other.copy_(result)


class SharedBroadcast(InPlace):
    """Every rank copies what lies in the part of one rank of the group, (elements,), into its own."""

    def __init__(self, memory: SharedMemory, parts: list[Tensor], source: int = 0) -> None:
        self._source, self._own = parts[source], parts[memory.rank]
        super().__init__(memory)

    def _combine(self) -> None:
        if self._own is not self._source:
            self._own.copy_(self._source)


class SharedReduceScatter(InPlace):
    """A sum of which each rank gets a row: of what is in the parts, (ranks, elements), r's row is added up by rank r.

    The sum is that of `add_in_order` over the ranks.
    """

    def __init__(self, memory: SharedMemory, parts: list[Tensor], own: Tensor) -> None:
        self._rows = [part.view(memory.size, -1)[memory.rank] for part in parts]
        self._own = own.view(-1)
        super().__init__(memory)

    def _combine(self) -> None:
        add_in_order(self._rows, self._own)


class SharedAllGather(InPlace):
    """Every rank copies what the others have: `sources`, (elements,) each, into the rows of `parts`."""

    def __init__(self, memory: SharedMemory, sources: list[Tensor], parts: Tensor) -> None:
        self._sources, self._parts = sources, parts.view(memory.size, -1)
        super().__init__(memory)

    def _combine(self) -> None:
        for row, source in zip(self._parts, self._sources, strict=True):
            if row.data_ptr() != source.data_ptr():
                row.copy_(source)


def all_reduce_through_slots(memory: SharedMemory, tensor: Tensor, op: ReduceOp.RedOpType) -> ThroughSlots:
    """Combine each rank's `tensor` (elements,), in place, over the ranks in their order, ((x0 + x1) + x2) + …"""
    pieces = tensor.split(SLOT_BYTES // tensor.element_size())

    def put(turn: int, slot: Tensor) -> None:
        _first(slot, pieces[turn]).copy_(pieces[turn])

    def take(turn: int, slots: list[Tensor]) -> None:
        piece = pieces[turn]
        combine_in_order([_first(slot, piece) for slot in slots], op, piece)
        if op == ReduceOp.AVG:
            piece.div_(memory.size)

    return ThroughSlots(memory, len(pieces), put, take)


def broadcast_through_slots(memory: SharedMemory, tensor: Tensor, source: int) -> ThroughSlots:
    """Copy the source's `tensor` (elements,) into every rank's."""
    pieces = tensor.split(SLOT_BYTES // tensor.element_size())

    def put(turn: int, slot: Tensor) -> None:
        if memory.rank == source:
            _first(slot, pieces[turn]).copy_(pieces[turn])

    def take(turn: int, slots: list[Tensor]) -> None:
        if memory.rank != source:
            pieces[turn].copy_(_first(slots[source], pieces[turn]))

    return ThroughSlots(memory, len(pieces), put, take)


def all_gather_through_slots(memory: SharedMemory, parts: Sequence[Tensor], own: Tensor) -> ThroughSlots:
    """Copy each rank's `own` (elements,) into every rank's `parts`, (elements,) each."""
    length = SLOT_BYTES // own.element_size()
    pieces, by_rank = own.split(length), [part.split(length) for part in parts]

    def put(turn: int, slot: Tensor) -> None:
        _first(slot, pieces[turn]).copy_(pieces[turn])

    def take(turn: int, slots: list[Tensor]) -> None:
        for of_rank, slot in zip(by_rank, slots, strict=True):
            of_rank[turn].copy_(_first(slot, of_rank[turn]))

    return ThroughSlots(memory, len(pieces), put, take)


def reduce_scatter_through_slots(memory: SharedMemory, own: Tensor, parts: Tensor) -> ThroughSlots:
    """Add up each rank's `parts` (ranks, elements), of which every rank gets its row in `own`; see `add_in_order`."""
    columns = SLOT_BYTES // (memory.size * own.element_size())
    into, pieces = own.split(columns), parts.split(columns, dim=1)

    def put(turn: int, slot: Tensor) -> None:
        _first(slot, pieces[turn]).view(pieces[turn].shape).copy_(pieces[turn])

    def take(turn: int, slots: list[Tensor]) -> None:
        shape = pieces[turn].shape
        add_in_order([_first(slot, pieces[turn]).view(shape)[memory.rank] for slot in slots], into[turn])

    return ThroughSlots(memory, len(pieces), put, take)


def all_to_all_through_slots(memory: SharedMemory, parts: Tensor, own: Tensor) -> ThroughSlots:
    """Give row r of `own` (ranks, elements) to rank r, which gets this rank's in that row of `parts`."""
    columns = SLOT_BYTES // (memory.size * own.element_size())
    into, pieces = parts.split(columns, dim=1), own.split(columns, dim=1)

    def put(turn: int, slot: Tensor) -> None:
        _first(slot, pieces[turn]).view(pieces[turn].shape).copy_(pieces[turn])

    def take(turn: int, slots: list[Tensor]) -> None:
        shape = pieces[turn].shape
        for row, slot in zip(into[turn], slots, strict=True):
            row.copy_(_first(slot, pieces[turn]).view(shape)[memory.rank])

    return ThroughSlots(memory, len(pieces), put, take)


def _first(slot: Tensor, like: Tensor) -> Tensor:
    """The beginning of a slot, with the size and dtype of a piece: (elements,)."""
    return slot[: like.nbytes].view(like.dtype)


def combine_in_order(parts: Sequence[Tensor], op: ReduceOp.RedOpType, result: Tensor) -> None:
    """Combine two or more of one shape and dtype, ((x0 + x1) + x2) + …; an average is not yet divided.

    `result` may be the first of them.
    """
    combine = COMBINE[ReduceOp.SUM if op == ReduceOp.AVG else op]
    first, *others = parts
    for other in others:
        combine(first, other, out=result)
        first = result


def add_in_order(rows: Sequence[Tensor], total: Tensor) -> None:
    """Add up two rows or more, (elements,) each, in their order: ((x0 + x1) + x2) + …

    Numbers of 16 bits are added in float32, and the sum is rounded once. `total`, (elements,), may be one of the rows.
    """
    dtype, in_a_chunk = total.dtype, max(1, CHUNK_BYTES // total.element_size())
    if dtype in (torch.bfloat16, torch.float16):
        dtype = torch.float32
    for into, first, *others in zip(*(row.split(in_a_chunk) for row in (total, *rows)), strict=True):
        in_progress = first.to(dtype) + others[0]
        for other in others[1:]:
            in_progress += other
        into.copy_(in_progress)


def from_rank_0(timeout: timedelta) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, timeout
    return options
