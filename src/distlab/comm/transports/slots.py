"""Collectives of tensors at any address, piece by piece through slots in the memory that their ranks share."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.transports.memory import SLOT_BYTES, SharedCollective, SharedMemory
from distlab.comm.transports.sums import add_in_order, combine_in_order


class ThroughSlots(SharedCollective):
    """A collective of tensors at any address, piece by piece through slots that stay in the caches.

    In each turn, every rank copies a piece of its tensor into its slot, and reads the data it needs from all slots.
    Each rank alternates between two slots: it writes to one again when all ranks have reached the next turn, and so
    have read it.

    Args:
        pieces: of this rank's tensor, one for each turn.
        take: (turn, all slots by rank) reads the data that this rank needs.
        puts: whether this rank's pieces are needed.
    """

    def __init__(
        self,
        memory: SharedMemory,
        pieces: Sequence[Tensor],
        take: Callable[[int, list[Tensor]], object],
        puts: bool = True,
    ) -> None:
        super().__init__(memory)
        self._pieces, self._turns, self._take, self._puts = pieces, len(pieces), take, puts
        self._turn, self._slots = 0, list[Tensor]()  # of the turn, once this rank has put its piece there

    def _put(self, turn: int, slot: Tensor) -> None:
        if self._puts:
            _first(slot, self._pieces[turn]).copy_(self._pieces[turn])

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


def all_reduce(memory: SharedMemory, tensor: Tensor, op: ReduceOp.RedOpType) -> ThroughSlots:
    """Combine each rank's `tensor` (elements,), in place, over the ranks in their order, ((x0 + x1) + x2) + …"""
    pieces = tensor.split(SLOT_BYTES // tensor.element_size())

    def take(turn: int, slots: list[Tensor]) -> None:
        piece = pieces[turn]
        combine_in_order([_first(slot, piece) for slot in slots], op, piece)
        if op == ReduceOp.AVG:
            piece.div_(memory.size)

    return ThroughSlots(memory, pieces, take)


def broadcast(memory: SharedMemory, tensor: Tensor, source: int) -> ThroughSlots:
    """Copy the source's `tensor` (elements,) into every rank's."""
    pieces = tensor.split(SLOT_BYTES // tensor.element_size())

    def take(turn: int, slots: list[Tensor]) -> None:
        if memory.rank != source:
            pieces[turn].copy_(_first(slots[source], pieces[turn]))

    return ThroughSlots(memory, pieces, take, puts=memory.rank == source)


def all_gather(memory: SharedMemory, parts: Sequence[Tensor], own: Tensor) -> ThroughSlots:
    """Copy each rank's `own` (elements,) into every rank's `parts`, (elements,) each."""
    length = SLOT_BYTES // own.element_size()
    pieces, by_rank = own.split(length), [part.split(length) for part in parts]

    def take(turn: int, slots: list[Tensor]) -> None:
        for of_rank, slot in zip(by_rank, slots, strict=True):
            of_rank[turn].copy_(_first(slot, of_rank[turn]))

    return ThroughSlots(memory, pieces, take)


def reduce_scatter(memory: SharedMemory, own: Tensor, parts: Tensor) -> ThroughSlots:
    """Add up each rank's `parts` (ranks, elements); every rank gets its row of the sum in `own`; see `add_in_order`."""
    columns = SLOT_BYTES // (memory.size * own.element_size())
    into, pieces = own.split(columns), parts.split(columns, dim=1)

    def take(turn: int, slots: list[Tensor]) -> None:
        add_in_order([_first(slot, pieces[turn])[memory.rank] for slot in slots], into[turn])

    return ThroughSlots(memory, pieces, take)


def all_to_all(memory: SharedMemory, parts: Tensor, own: Tensor) -> ThroughSlots:
    """Send row r of `own` (ranks, elements) to rank r, and receive its row for this rank in row r of `parts`."""
    columns = SLOT_BYTES // (memory.size * own.element_size())
    into, pieces = parts.split(columns, dim=1), own.split(columns, dim=1)

    def take(turn: int, slots: list[Tensor]) -> None:
        for row, slot in zip(into[turn], slots, strict=True):
            row.copy_(_first(slot, pieces[turn])[memory.rank])

    return ThroughSlots(memory, pieces, take)


class UnevenAllToAll(ThroughSlots):
    """Sends parts of any size: `sent[r]` to rank r, and receives rank r's part for this rank in `received[r]`.

    Ranks know only the sizes of the parts that they send and receive. So each slot begins with the sizes of all parts
    that its rank sends, from which the others know where their parts begin, and how many turns the collective takes.

    Args:
        sent, received: a contiguous tensor for each rank.
    """

    def __init__(self, memory: SharedMemory, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        super().__init__(memory, [], self._read)
        self._turns = 1  # at least; the sizes tell how many
        self._sent, self._received = list(map(_bytes, sent)), list(map(_bytes, received))
        received[memory.rank].copy_(sent[memory.rank])
        self._sent[memory.rank] = self._sent[memory.rank][:0]
        sizes = [len(part) for part in self._sent]
        self._sizes = torch.tensor(sizes)
        self._sent_at = [sum(sizes[:rank]) for rank in range(memory.size)]
        self._received_at: list[int] = []  # where this rank's part begins in all that another rank sends
        self._room = SLOT_BYTES - self._sizes.nbytes

    def _put(self, turn: int, slot: Tensor) -> None:
        if turn == 0:
            _first(slot, self._sizes).copy_(self._sizes)
        piece = slot[self._sizes.nbytes :]
        for part, start in zip(self._sent, self._sent_at, strict=True):
            for inside, of_part in self._overlap(turn, start, len(part)):
                piece[inside].copy_(part[of_part])

    def _read(self, turn: int, slots: list[Tensor]) -> None:
        own = self._memory.rank
        if turn == 0:
            table = torch.stack([_first(slot, self._sizes) for slot in slots])  # (source, target)
            self._received_at = table[:, :own].sum(dim=1).tolist()
            self._turns = max(1, -(-int(table.sum(dim=1).max()) // self._room))
        for source, (part, start) in enumerate(zip(self._received, self._received_at, strict=True)):
            if source != own:
                piece = slots[source][self._sizes.nbytes :]
                for inside, of_part in self._overlap(turn, start, len(part)):
                    part[of_part].copy_(piece[inside])

    def _overlap(self, turn: int, start: int, length: int) -> Iterator[tuple[slice, slice]]:
        """Yield which bytes of a turn's piece are in a part, and which of the part they are; nothing if none are."""
        offset = start - turn * self._room  # of the part in the piece
        first, end = max(0, offset), min(self._room, offset + length)
        if first < end:
            yield slice(first, end), slice(first - offset, end - offset)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def _first(slot: Tensor, like: Tensor) -> Tensor:
    """Return the beginning of a slot, with the shape and dtype of a piece."""
    return slot[: like.nbytes].view(like.dtype).view(like.shape)
