"""The handwritten ring all-reduce: chunks travel around a ring of ranks, in messages of about 1 MB.

The algorithm is from Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

Most of the time is spent in the kernel, copying messages. After each message the caches are cold, and the next call of
any Python or torch function costs tens of microseconds. So everything that depends only on the sizes is computed once
(`_route`), and one call creates all segments.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.axes.layout import equal_parts
from distlab.collectives.buffers import Op, in_place, reduce_function, scratch_buffer
from distlab.comm.endpoint import Endpoint

BOTH_WAYS_BYTES = 16_000_000
SEGMENT_BYTES = 1_000_000
AHEAD = 3  # number of segments that a rank sends ahead of its receives; a whole chunk would not fit in the caches


def allreduce_ring(
    tensor: Tensor,
    op: Op = ReduceOp.SUM,
    endpoint: Endpoint = dist,
    both_ways_bytes: int = BOTH_WAYS_BYTES,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Combine all tensors on every rank: chunks travel around a ring, first to be combined, then to be distributed.

    With n ranks, each rank sends 2 (n - 1) / n of the tensor, and receives as much at the same time. If a tensor has at
    least `both_ways_bytes` per rank, one half of it travels the other way, so that the links between neighbors are
    busy in both directions (between two ranks they always are). For a smaller tensor, the cost of twice as many
    messages would be higher than the gain.
    """
    combine = reduce_function(op, tensor.dtype)
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
    """All-reduce `flat` (elements,) in place around the ring; yield after starting the messages of a turn.

    `step` is 1 to send to the next rank, -1 to send to the previous one.
    """
    rank, size = endpoint.get_rank(), endpoint.get_world_size()
    following, preceding = (rank + step) % size, (rank - step) % size
    isend, irecv = endpoint.isend, endpoint.irecv
    sizes, turns = _route(flat.numel(), flat.element_size(), rank, size, step, segment_bytes)
    segments = flat.split_with_sizes(sizes)
    to_combine = scratch_buffer(segments[0], number=step)  # always the same memory, so that it stays in the caches
    sends = []
    for outgoing, arriving, is_combined in turns:
        received = segments[arriving]  # free: its send completed long ago, since the arriving data was computed from it
        if is_combined:
            received = to_combine if sizes[arriving] == sizes[0] else to_combine[: sizes[arriving]]
        # First receive, then send: if the receiver is known to be ready, this thread writes the message while its
        # content is still in the caches; otherwise gloo's thread does so later.
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
    """The segments, by number, that a rank sends and receives at the same time."""

    outgoing: tuple[int, ...]
    arriving: int
    is_combined: bool  # with this rank's own segment; otherwise it is part of the result, and replaces the segment


@functools.lru_cache(maxsize=64)  # enough for a model's gradient buckets
def _route(
    elements: int, element_bytes: int, rank: int, size: int, step: int, segment_bytes: int
) -> tuple[tuple[int, ...], tuple[Turn, ...]]:
    """Return the way of a tensor around the ring: the sizes of its segments, the largest first, and the turns.

    Each chunk travels around the ring nearly twice: first to be combined on every rank, then to be distributed. So a
    rank always sends what it received one chunk earlier. If there are fewer elements than ranks, some segments are
    empty, and are sent like the others.
    """
    chunks = equal_parts(elements, size)
    in_chunk = max(1, min(chunks[0], round(chunks[0] * element_bytes / segment_bytes)))
    sizes = tuple(part for chunk in chunks for part in equal_parts(chunk, in_chunk))
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
