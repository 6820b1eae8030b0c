"""The ring all-reduce by hand: chunks go round a ring of ranks, in messages of about 1 MB.

The algorithm: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

Most of the time is that of copying, in the kernel, what ranks send each other. What is left to save is in between:
whenever a rank is woken up for a message, the copying has emptied the caches, and each Python or torch function that it
calls for the first time since then costs tens of microseconds. So all that depends only on the sizes is worked out once
(`_route`), the segments are made in one call, and messages go through the process group's own methods.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.operands import InPlace, Op, combination

BOTH_WAYS_BYTES = 16_000_000
SEGMENT_BYTES = 1_000_000
AHEAD = 3  # segments that a rank sends more than it has received: all of a chunk would not find room in the caches


def allreduce_ring(
    tensor: Tensor,
    op: Op = ReduceOp.SUM,
    both_ways_bytes: int = BOTH_WAYS_BYTES,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Combine all tensors on every rank: chunks go round a ring, first to be combined, then to be handed out.

    Each rank sends 2 (n - 1) / n of the tensor, whatever the world size n, and receives as much at the same time. Of a
    large tensor one half goes round the other way, so that between any two neighbours, too, both directions are busy
    (between two ranks they are anyway); a smaller one is not worth twice as many messages.

    Args:
        tensor: this rank's; the result on every rank.
        op: how to combine.
        both_ways_bytes: large is a tensor with at least this much for each rank.
        segment_bytes: a chunk travels in messages of about this much.
    """
    combine = combination(op, tensor.dtype)
    size = dist.get_world_size()
    with InPlace(tensor) as data:
        flat = data.view(-1)
        halves = flat.tensor_split(2) if size > 2 and flat.nbytes >= size * both_ways_bytes else (flat,)
        rings = [_around(half, step, combine, segment_bytes) for half, step in zip(halves, (1, -1), strict=False)]
        for _ in zip_longest(*rings):
            pass


def _around(flat: Tensor, step: int, combine: Callable[..., Tensor], segment_bytes: int) -> Iterator[None]:
    """All-reduce `flat` around the ring in one direction; yields when the messages of a segment are under way.

    Segments are sent few at a time. Those to be combined all arrive in the same memory, which therefore stays in the
    caches.

    Args:
        flat: (elements,), changed in place.
        step: 1 to send to the next rank, -1 to the one before.
        combine: the element-wise function.
        segment_bytes: what a message is to have, about.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    following, preceding = (rank + step) % size, (rank - step) % size
    begin_to_send, begin_to_receive = _messages()
    route = _route(flat.numel(), flat.element_size(), rank, size, step, segment_bytes)
    segments = flat.split_with_sizes(route.sizes)
    space = _space(route.sizes[0], flat.dtype, flat.device, step, threading.get_ident())

    # Each rank's chunk sets out, to be combined with that of every rank that it passes.
    sends = []
    for outgoing, arriving in route.combining.turns:
        elements = route.sizes[arriving]
        received = space if elements == route.sizes[0] else space[:elements]
        # Received first, sent then: where the other end is known to be ready, this thread writes the message, while its
        # content is still in the caches; otherwise gloo's does, later.
        work = begin_to_receive(received, preceding)
        sends += [begin_to_send(segments[number], following) for number in outgoing]
        yield
        work.wait()
        combine(segments[arriving], received, out=segments[arriving])
    sends += [begin_to_send(segments[number], following) for number in route.combining.rest]
    for send in sends:  # their segments are written again below
        send.wait()

    # Now each rank has one chunk of the result. Handed out, they go to where they belong.
    works = [begin_to_receive(segments[arriving], preceding) for _, arriving in route.handing_out.turns]
    sends = []
    for (outgoing, _), work in zip(route.handing_out.turns, works, strict=True):
        sends += [begin_to_send(segments[number], following) for number in outgoing]
        yield
        work.wait()
    sends += [begin_to_send(segments[number], following) for number in route.handing_out.rest]
    for send in sends:
        send.wait()


def _messages() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What `dist.isend` and `dist.irecv` do, without their checks; and they themselves, where a stand-in took over."""
    group = dist.group.WORLD
    if group is None:
        return dist.isend, dist.irecv
    return (
        lambda tensor, to: group.send([tensor], to, 0),
        lambda tensor, source: group.recv([tensor], source, 0),
    )


class Leg(NamedTuple):
    """What a rank sends and receives while chunks go round once, in order; segments have numbers.

    Attributes:
        turns: what to send, and then the one that arrives.
        rest: what to send when all have arrived; none, but where chunks are empty.
    """

    turns: tuple[tuple[tuple[int, ...], int], ...]
    rest: tuple[int, ...]


class Route(NamedTuple):
    """How a tensor goes round the ring.

    Attributes:
        sizes: elements of each segment; the first one has the most.
        combining, handing_out: its two ways round.
    """

    sizes: tuple[int, ...]
    combining: Leg
    handing_out: Leg


@functools.lru_cache(maxsize=64)  # of a model's buckets of gradients
def _route(elements: int, element_bytes: int, rank: int, size: int, step: int, segment_bytes: int) -> Route:
    """The segments' sizes and order; a chunk has as many segments as make them about `segment_bytes` each."""
    chunks = _sizes_of_parts(elements, size)
    in_chunk = max(1, round(chunks[0] * element_bytes / segment_bytes))
    sizes = tuple(part for chunk in chunks for part in _sizes_of_parts(chunk, in_chunk))

    def segments(chunk: int) -> tuple[int, ...]:
        first = chunk % size * in_chunk
        return tuple(number for number in range(first, first + in_chunk) if sizes[number])

    def leg(own: int) -> Leg:
        arriving = tuple(number for turn in range(1, size) for number in segments(own - step * turn))
        outgoing = segments(own) + arriving[: len(arriving) - len(segments(own + step))]
        ahead = min(AHEAD, len(segments(own)))
        ends = [ahead + turn for turn in range(len(arriving))]  # what is to be sent before each turn's arrival
        sent = [outgoing[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return Leg(tuple(zip(sent, arriving, strict=True)), outgoing[ends[-1] :] if ends else outgoing)

    return Route(sizes, leg(rank), leg(rank + step))


def _sizes_of_parts(elements: int, parts: int) -> list[int]:
    """So many elements in parts as equal as they can be, the larger ones first."""
    return [elements // parts + (part < elements % parts) for part in range(parts)]


@functools.lru_cache(maxsize=16)  # kept for the next call, as `operands.space` is
@torch.inference_mode(False)  # the next call may be outside of what this one is in
def _space(elements: int, dtype: torch.dtype, device: torch.device, step: int, thread: int) -> Tensor:
    """Memory to receive a segment into; of its own for either direction, and for threads that play ranks."""
    return torch.empty(elements, dtype=dtype, device=device)
