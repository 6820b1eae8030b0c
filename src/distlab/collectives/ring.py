"""The ring all-reduce by hand: chunks travel around a ring of ranks, in messages of about 1 MB.

The algorithm: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

Most of the time the kernel copies messages. Each leaves the caches cold, so that every Python or torch function called
for the first time after it costs tens of microseconds. So all that depends only on the sizes is computed once
(`_route`), the segments are made in one call, and messages go through the process group's own methods.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.collectives.buffers import Op, in_place, reduce_function, scratch_buffer
from distlab.comm.endpoint import Endpoint, process_group

BOTH_WAYS_BYTES = 16_000_000
SEGMENT_BYTES = 1_000_000
AHEAD = 3  # segments that a rank has sent more than received: all of a chunk would not fit in the caches


def allreduce_ring(
    tensor: Tensor,
    op: Op = ReduceOp.SUM,
    endpoint: Endpoint = dist,
    both_ways_bytes: int = BOTH_WAYS_BYTES,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Combine all tensors on every rank: chunks travel around a ring, first to be combined, then to be distributed.

    In a world of n each rank sends 2 (n - 1) / n of the tensor, and receives as much at the same time. One half of a
    tensor of at least `both_ways_bytes` for each rank travels the other way, so that both directions are busy between
    neighbours (between two ranks they are anyway); a smaller one is not worth twice as many messages.
    """
    combine = reduce_function(op, tensor.dtype)
    if endpoint is dist:
        endpoint = process_group()
    size = endpoint.get_world_size()
    if size == 1:
        return
    with in_place(tensor) as data:
        flat = data.view(-1)
        halves = flat.tensor_split(2) if size > 2 and flat.nbytes >= size * both_ways_bytes else (flat,)
        rings = [_around(half, 1 - 2 * index, combine, endpoint, segment_bytes) for index, half in enumerate(halves)]
        for _ in zip_longest(*rings):
            pass


def _around(
    flat: Tensor, step: int, combine: Callable[..., Tensor], endpoint: Endpoint, segment_bytes: int
) -> Iterator[None]:
    """All-reduce `flat` (elements,) in place around the ring; yields when the messages of a turn have been started.

    `step` is 1 to send to the next rank, -1 to send to the one before.
    """
    rank, size = endpoint.get_rank(), endpoint.get_world_size()
    following, preceding = (rank + step) % size, (rank - step) % size
    isend, irecv = endpoint.isend, endpoint.irecv
    sizes, turns = _route(flat.numel(), flat.element_size(), rank, size, step, segment_bytes)
    segments = flat.split_with_sizes(sizes)
    to_combine = scratch_buffer(segments[0], number=step)  # always the same memory, which therefore stays in the caches
    sends = []
    for outgoing, arriving, is_combined in turns:
        received = segments[arriving]  # sent long ago: what arrives was made from what this rank sent of it
        if is_combined:
            received = to_combine if sizes[arriving] == sizes[0] else to_combine[: sizes[arriving]]
        # First receive, then send: if the other end is known to be ready, this thread writes the message while its
        # content is still in the caches; otherwise gloo's does so later.
        work = irecv(received, preceding)
        for number in outgoing:
            sends.append(isend(segments[number], following))
        yield
        work.wait()
        if is_combined:
            combine(segments[arriving], received, out=segments[arriving])
    for send in sends:
        send.wait()


class Turn(NamedTuple):
    """The numbers of the segments that a rank sends and, meanwhile, receives."""

    outgoing: tuple[int, ...]
    arriving: int
    is_combined: bool  # with this rank's own segment; otherwise it is part of the result and replaces that


@functools.lru_cache(maxsize=64)  # of a model's buckets of gradients
def _route(
    elements: int, element_bytes: int, rank: int, size: int, step: int, segment_bytes: int
) -> tuple[tuple[int, ...], tuple[Turn, ...]]:
    """How a tensor travels around the ring: its segments' sizes, the largest first, and the turns.

    Each rank's chunk travels around nearly twice: first to be combined with those of the other ranks, then to be
    distributed. So what is sent is what arrived a chunk ago. A tensor of fewer elements than ranks has empty segments,
    which are sent all the same.
    """
    chunks = _sizes_of_parts(elements, size)
    in_chunk = max(1, min(chunks[0], round(chunks[0] * element_bytes / segment_bytes)))
    sizes = tuple(part for chunk in chunks for part in _sizes_of_parts(chunk, in_chunk))
    passing = [
        (rank - step * away) % size * in_chunk + number for away in range(2 * size - 1) for number in range(in_chunk)
    ]
    outgoing, arriving = passing[:-in_chunk], passing[in_chunk:]
    ahead = min(AHEAD, in_chunk)
    turns = []
    for turn, number in enumerate(arriving):
        sent_now = outgoing[turn + ahead - 1 if turn else 0 : turn + ahead]
        turns.append(Turn(tuple(sent_now), number, is_combined=turn < (size - 1) * in_chunk))
    return sizes, tuple(turns)


def _sizes_of_parts(elements: int, parts: int) -> list[int]:
    """The sizes of parts of so many elements, as equal as possible, the larger ones first."""
    return [elements // parts + (part < elements % parts) for part in range(parts)]
