"""Collectives of tensors at any address, piece by piece through slots in the memory that their ranks share.

In each turn, every rank copies a piece of its tensor into its slot, and reads the data it needs from all slots.
"""

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.transports.memory import SLOT_BYTES, SharedMemory
from distlab.comm.transports.sums import add_in_order, combine_in_order


def _exchange(memory: SharedMemory, piece: Tensor) -> Generator[None, None, list[Tensor]]:
    """Take a turn: put this rank's piece into its slot, and return the pieces of all ranks in their slots."""
    pieces = [_first(slot, piece) for slot in memory.next_slots()]
    pieces[memory.rank].copy_(piece)
    yield
    return pieces


def all_reduce(memory: SharedMemory, tensor: Tensor, op: ReduceOp.RedOpType) -> Iterator[None]:
    """Combine each rank's `tensor` (elements,), in place, over the ranks in their order, ((x0 + x1) + x2) + …"""
    for piece in tensor.split(SLOT_BYTES // tensor.element_size()):
        pieces = yield from _exchange(memory, piece)
        combine_in_order(pieces, op, piece)
        if op == ReduceOp.AVG:
            piece.div_(memory.size)


def broadcast(memory: SharedMemory, tensor: Tensor, source: int) -> Iterator[None]:
    """Copy the source's `tensor` (elements,) into every rank's."""
    is_source = memory.rank == source
    for piece in tensor.split(SLOT_BYTES // tensor.element_size()):
        in_slot = _first(memory.next_slots()[source], piece)
        if is_source:
            in_slot.copy_(piece)
        yield
        if not is_source:
            piece.copy_(in_slot)


def all_gather(memory: SharedMemory, parts: Sequence[Tensor], own: Tensor) -> Iterator[None]:
    """Copy each rank's `own` (elements,) into every rank's `parts`, (elements,) each."""
    length = SLOT_BYTES // own.element_size()
    for piece, *into in zip(own.split(length), *(part.split(length) for part in parts), strict=True):
        pieces = yield from _exchange(memory, piece)
        for of_rank, received in zip(into, pieces, strict=True):
            of_rank.copy_(received)


def reduce_scatter(memory: SharedMemory, own: Tensor, parts: Tensor) -> Iterator[None]:
    """Add up each rank's `parts` (ranks, elements); every rank gets its row of the sum in `own`; see `add_in_order`."""
    columns = SLOT_BYTES // (memory.size * own.element_size())
    for piece, into in zip(parts.split(columns, dim=1), own.split(columns), strict=True):
        pieces = yield from _exchange(memory, piece)
        add_in_order([rows[memory.rank] for rows in pieces], into)


def all_to_all(memory: SharedMemory, parts: Tensor, own: Tensor) -> Iterator[None]:
    """Send row r of `own` (ranks, elements) to rank r, and receive its row for this rank in row r of `parts`."""
    columns = SLOT_BYTES // (memory.size * own.element_size())
    for piece, into in zip(own.split(columns, dim=1), parts.split(columns, dim=1), strict=True):
        pieces = yield from _exchange(memory, piece)
        for row, rows in zip(into, pieces, strict=True):
            row.copy_(rows[memory.rank])


def uneven_all_to_all(memory: SharedMemory, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Iterator[None]:
    """Send parts of any size: `sent[r]` to rank r, and receive rank r's part for this rank in `received[r]`.

    Ranks know only the sizes of the parts that they send and receive. So each slot begins with the sizes of all parts
    that its rank sends, from which the others know where their parts begin, and how many turns the collective takes.

    Args:
        received, sent: a contiguous tensor for each rank.
    """
    rank, ranks = memory.rank, range(memory.size)
    received[rank].copy_(sent[rank])
    into, parts = list(map(_bytes, received)), list(map(_bytes, sent))
    parts[rank] = into[rank] = parts[rank][:0]
    sizes = torch.tensor([len(part) for part in parts])
    room = SLOT_BYTES - sizes.nbytes
    sent_at = (sizes.cumsum(0) - sizes).tolist()  # where each part begins in all that this rank sends
    received_at: list[int] = []  # where this rank's part begins in all that another rank sends
    turn, turns = 0, 1  # the sizes tell how many
    while turn < turns:
        slots = memory.next_slots()
        pieces = [slot[sizes.nbytes :] for slot in slots]
        if turn == 0:
            _first(slots[rank], sizes).copy_(sizes)
        for part, start in zip(parts, sent_at, strict=True):
            for inside, of_part in _overlap(turn * room, room, start, len(part)):
                pieces[rank][inside].copy_(part[of_part])
        yield
        if turn == 0:
            table = torch.stack([_first(slot, sizes) for slot in slots])  # (source, target)
            received_at = table[:, :rank].sum(dim=1).tolist()
            turns = -(-int(table.sum(dim=1).max()) // room)
        for source in ranks:
            for inside, of_part in _overlap(turn * room, room, received_at[source], len(into[source])):
                into[source][of_part].copy_(pieces[source][inside])
        turn += 1


def _overlap(begin: int, room: int, start: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Yield which bytes of a piece are in a part, and which of the part they are; nothing if none are.

    The piece has `room` bytes from `begin` on, the part `length` from `start` on.
    """
    offset = start - begin  # of the part in the piece
    first, end = max(0, offset), min(room, offset + length)
    if first < end:
        yield slice(first, end), slice(first - offset, end - offset)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def _first(slot: Tensor, like: Tensor) -> Tensor:
    """Return the beginning of a slot, with the shape and dtype of a piece."""
    return slot[: like.nbytes].view(like.dtype).view(like.shape)
