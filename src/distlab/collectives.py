"""Collective operations by hand: how broadcast, reduce, all-reduce and gather travel over several topologies.

All work in place on the caller's tensor, of any dtype and shape, for every world size and root. Apart from the ring
all-reduce they use only `send`, `recv`, `get_rank`, `get_world_size` and `barrier`, which they look up on
`torch.distributed` when they are called: a stand-in with the same five functions can take its place
(`distlab.simulation`). `send` may return only when its receiver has taken the message, so wherever two ranks give each
other something, one gives first and the other takes first.

Latency and bandwidth of these algorithms: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005; the ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

Op = ReduceOp.RedOpType
ELEMENT_WISE: dict[Op, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}
COMBINE = dict(ELEMENT_WISE)  # as the collectives do it; a stand-in may take their place
BOTH_WAYS_BYTES = 16_000_000
SEGMENT_BYTES = 2_000_000
SPACES = 2  # to receive segments into that are to be combined, so that one arrives while another one is
KEPT_BYTES = 64_000_000


def broadcast_naive(tensor: Tensor, src: int) -> None:
    """Copy rank `src`'s tensor to all: the root sends to one rank after the other, world size - 1 times."""
    size = _places(src)[0]
    with InPlace(tensor) as data:
        if dist.get_rank() != src:
            dist.recv(data, src)
            return
        for other in range(size):
            if other != src:
                dist.send(data, other)


def broadcast_tree(tensor: Tensor, src: int) -> None:
    """Copy rank `src`'s tensor to all: who has it passes it on, so that in each round twice as many ranks have it."""
    size, place, rank_at = _places(src)
    with InPlace(tensor) as data:
        for distance in _powers_of_two(size):
            if place < distance and place + distance < size:
                dist.send(data, rank_at(place + distance))
            elif distance <= place < 2 * distance:
                dist.recv(data, rank_at(place - distance))


def broadcast_ring(tensor: Tensor, src: int) -> None:
    """Copy rank `src`'s tensor to all: each rank passes it on to the next one."""
    size, place, rank_at = _places(src)
    with InPlace(tensor) as data:
        if place > 0:
            dist.recv(data, rank_at(place - 1))
        if place < size - 1:
            dist.send(data, rank_at(place + 1))


def reduce_naive(tensor: Tensor, dst: int, op: Op = ReduceOp.SUM) -> None:
    """Combine all tensors in rank `dst`'s; it receives one after the other. The other ranks' stay as they are."""
    combine = _combination(op, tensor.dtype)
    size = _places(dst)[0]
    with InPlace(tensor, is_changed=dist.get_rank() == dst) as data:
        if dist.get_rank() != dst:
            dist.send(data, dst)
            return
        received = _space(data)
        for other in range(size):
            if other != dst:
                dist.recv(received, other)
                combine(data, received, out=data)


def reduce_tree(tensor: Tensor, dst: int, op: Op = ReduceOp.SUM) -> None:
    """Combine all tensors in rank `dst`'s: in each round half of the ranks hand theirs over to the other half."""
    combine = _combination(op, tensor.dtype)
    size, place, rank_at = _places(dst)
    with InPlace(tensor, is_changed=place == 0) as data:
        partial = data
        for distance in reversed(_powers_of_two(size)):
            if place < distance and place + distance < size:
                received = _space(data)
                dist.recv(received, rank_at(place + distance))
                # Only the root's tensor is the caller's to change.
                partial = combine(partial, received, out=data if place == 0 else _space(data, 1))
            elif distance <= place < 2 * distance:
                dist.send(partial, rank_at(place - distance))


def allreduce_naive(tensor: Tensor, op: Op = ReduceOp.SUM) -> None:
    """Combine all tensors on every rank: all send to rank 0, which sends the result to all."""
    reduce_naive(tensor, 0, op)
    broadcast_naive(tensor, 0)


def allreduce_tree(tensor: Tensor, op: Op = ReduceOp.SUM) -> None:
    """Combine all tensors on every rank: up a tree to rank 0, and down again."""
    reduce_tree(tensor, 0, op)
    broadcast_tree(tensor, 0)


def allreduce_butterfly(tensor: Tensor, op: Op = ReduceOp.SUM) -> None:
    """Combine all tensors on every rank: in round k the ranks whose numbers differ in bit k exchange what they have.

    In a world that is no power of two, the ranks beyond the largest one hand theirs over first and get the result back.
    """
    combine = _combination(op, tensor.dtype)
    rank, size = dist.get_rank(), dist.get_world_size()
    core = 1 << (size.bit_length() - 1)
    with InPlace(tensor) as data:
        if rank >= core:
            dist.send(data, rank - core)
            dist.recv(data, rank - core)
            return
        received = _space(data)
        if rank + core < size:
            dist.recv(received, rank + core)
            combine(data, received, out=data)
        for distance in _powers_of_two(core):
            _exchange(data, received, rank ^ distance)
            combine(data, received, out=data)
        if rank + core < size:
            dist.send(data, rank + core)


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
    combine = _combination(op, tensor.dtype)
    size = dist.get_world_size()
    with InPlace(tensor) as data:
        flat = data.view(-1)
        halves = flat.tensor_split(2 if size > 2 and flat.nbytes >= size * both_ways_bytes else 1)
        rings = [_around(half, step, combine, segment_bytes) for half, step in zip(halves, (1, -1), strict=False)]
        for _ in zip_longest(*rings):
            pass


def _around(flat: Tensor, step: int, combine: Callable[..., Tensor], segment_bytes: int) -> Iterator[None]:
    """All-reduce `flat` around the ring in one direction; yields when the messages of a segment are under way.

    While a segment of a chunk is combined and passed on, the next one arrives.

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
    chunks = flat.tensor_split(size)
    segments = [chunk.tensor_split(max(1, round(chunks[0].nbytes / segment_bytes))) for chunk in chunks]
    last_turn = size - 2

    def leave(chunk: int) -> list[dist.Work]:
        return [_started(dist.isend(segment, following)) for segment in segments[chunk % size] if len(segment)]

    def arriving(chunk: int) -> list[tuple[int, Tensor]]:
        """A turn after the other: which it is, and a segment; of `chunk` in the first one."""
        turns = range(size - 1)
        return [(turn, segment) for turn in turns for segment in segments[(chunk - step * turn) % size] if len(segment)]

    # Each rank's chunk sets out, to be combined with that of every rank that it passes.
    sends = leave(rank)
    partial = arriving(rank - step)
    spaces = [_space(segments[0][0], step * (1 + number)) for number in range(SPACES)]

    def receive(number: int) -> tuple[dist.Work, Tensor]:
        received = spaces[number % SPACES][: len(partial[number][1])]
        return _started(dist.irecv(received, preceding)), received

    receives = deque(receive(number) for number in range(min(SPACES, len(partial))))
    for number, (turn, segment) in enumerate(partial):
        yield
        work, received = receives.popleft()
        work.wait()
        combine(segment, received, out=segment)
        # Sent before the next is received: then gloo's thread writes, as soon as the other end is ready. Were it this
        # thread, gloo's would spin on its lock meanwhile, for a whole time slice if there are fewer cores than threads.
        if turn < last_turn:
            sends.append(_started(dist.isend(segment, following)))
        if number + SPACES < len(partial):
            receives.append(receive(number + SPACES))
    for send in sends:  # their segments are written again below
        send.wait()

    # Now each rank has one chunk of the result. Handed out, they go to where they belong.
    sends = leave(rank + step)
    results = arriving(rank)
    works = [_started(dist.irecv(segment, preceding)) for _, segment in results]
    for (turn, segment), work in zip(results, works, strict=True):
        yield
        work.wait()
        if turn < last_turn:
            sends.append(_started(dist.isend(segment, following)))
    for send in sends:
        send.wait()


ALL_REDUCES = {
    "naive": allreduce_naive,
    "tree": allreduce_tree,
    "butterfly": allreduce_butterfly,
    "ring": allreduce_ring,
}


def gather_naive(tensor: Tensor, gathered: Tensor | None, dst: int) -> None:
    """Collect all tensors on rank `dst`, which receives one after the other.

    Args:
        tensor: this rank's part.
        gathered: on rank `dst` (world size, *shape of `tensor`), one part a rank; None elsewhere.
        dst: the rank that collects.
    """
    size = _places(dst)[0]
    if dist.get_rank() != dst:
        dist.send(tensor.detach().contiguous(), dst)
        return
    with InPlace(_for_all(gathered, tensor)) as parts:
        for other in range(size):
            if other == dst:
                parts[other] = tensor.detach()
            else:
                dist.recv(parts[other], other)


def gather_tree(tensor: Tensor, gathered: Tensor | None, dst: int) -> None:
    """Collect all tensors on rank `dst`: in each round half of the ranks hand over all that they have collected."""
    size, place, rank_at = _places(dst)
    if place > 0:
        _collect(tensor, _space(tensor, count=size - place), place, rank_at)
        return
    with InPlace(_for_all(gathered, tensor)) as whole:
        if dst == 0:  # places are ranks
            _collect(tensor, whole, place, rank_at)
            return
        parts = _space(tensor, count=size)
        _collect(tensor, parts, place, rank_at)
        whole[dst:], whole[:dst] = parts[: size - dst], parts[size - dst :]


def _collect(tensor: Tensor, parts: Tensor, place: int, rank_at: Callable[[int], int]) -> None:
    """One rank of `gather_tree`: collect the parts from its own place on, and hand them over if it is not the root."""
    parts[0] = tensor.detach()
    for distance in _powers_of_two(dist.get_world_size()):
        if place % (2 * distance):
            dist.send(parts[:distance], rank_at(place - distance))
            return
        if distance < len(parts):
            dist.recv(parts[distance : 2 * distance], rank_at(place + distance))


def allgather_naive(tensor: Tensor, gathered: Tensor) -> None:
    """Collect all tensors on every rank, `gathered` (world size, *shape of `tensor`): through rank 0."""
    gather_naive(tensor, _for_all(gathered, tensor), 0)
    broadcast_naive(gathered, 0)


def allgather_tree(tensor: Tensor, gathered: Tensor) -> None:
    """Collect all tensors on every rank, `gathered` (world size, *shape of `tensor`): up a tree and down again."""
    gather_tree(tensor, _for_all(gathered, tensor), 0)
    broadcast_tree(gathered, 0)


def allgather_ring(tensor: Tensor, gathered: Tensor) -> None:
    """Collect all tensors on every rank, `gathered` (world size, *shape of `tensor`): they go round the ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with InPlace(_for_all(gathered, tensor)) as parts:
        parts[rank] = tensor.detach()
        for turn in range(size - 1):
            known, missing = (rank - turn) % size, (rank - turn - 1) % size
            _exchange(parts[known], parts[missing], (rank + 1) % size, (rank - 1) % size)


def reducescatter_naive(tensor: Tensor, scattered: Tensor, op: Op = ReduceOp.SUM) -> None:
    """Combine all tensors and give each rank its block: rank 0 combines all and sends the blocks.

    Args:
        tensor: (world size, *shape of `scattered`), a block for each rank; stays as it is.
        scattered: this rank's block of the result.
        op: how to combine.
    """
    tensor = _for_all(tensor, scattered).detach()
    combined = _space(tensor, 1).copy_(tensor) if dist.get_rank() == 0 else tensor
    reduce_naive(combined, 0, op)
    with InPlace(scattered) as block:
        if dist.get_rank() > 0:
            dist.recv(block, 0)
            return
        for other in range(1, dist.get_world_size()):
            dist.send(combined[other].contiguous(), other)
        block.copy_(combined[0])


def reducescatter_ring(tensor: Tensor, scattered: Tensor, op: Op = ReduceOp.SUM) -> None:
    """Combine all tensors and give each rank its block: partial sums go round the ring to the rank that keeps them.

    The arguments are those of `reducescatter_naive`.
    """
    combine = _combination(op, tensor.dtype)
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = _for_all(tensor, scattered).detach()
    with InPlace(scattered) as block:
        partial, received = tensor[(rank - 1) % size].contiguous(), _space(block)
        for turn in range(size - 1):
            _exchange(partial, received, (rank + 1) % size, (rank - 1) % size)
            is_last = turn == size - 2  # `scattered` may be a part of `tensor`: it is not changed before
            into = block if is_last else _space(block, 1)
            partial = combine(received, tensor[(rank - turn - 2) % size], out=into)
        if size == 1:
            block.copy_(partial)


class InPlace:
    """A contiguous view or copy of a tensor, since messages are contiguous; a copy is written back at the end.

    Args:
        tensor: the caller's; the gradients of what becomes of it are not of interest.
        is_changed: whether to write back.
    """

    def __init__(self, tensor: Tensor, is_changed: bool = True) -> None:
        self._tensor, self._is_changed = tensor.detach(), is_changed

    def __enter__(self) -> Tensor:
        self._data = self._tensor.contiguous()
        return self._data

    def __exit__(self, error: object, *_: object) -> None:
        if self._is_changed and error is None and self._data is not self._tensor:
            self._tensor.copy_(self._data)


def _space(like: Tensor, number: int = 0, count: int | None = None) -> Tensor:
    """Memory to receive into: like a tensor, or like `count` of them; another one for another number.

    The last few, if they are not very large, are kept for the next call: the operating system clears fresh memory page
    by page when it is first written to, which takes as long as a message does.
    """
    shape = like.shape if count is None else torch.Size((count, *like.shape))
    if like.is_meta or shape.numel() * like.element_size() > KEPT_BYTES:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return _kept_space(shape, like.dtype, like.device, number, threading.get_ident())


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)  # the next call may be outside of what this one is in
def _kept_space(shape: torch.Size, dtype: torch.dtype, device: torch.device, number: int, thread: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _exchange(data: Tensor, received: Tensor, to: int, source: int | None = None) -> None:
    """Send to one rank and receive from another (by default the same), though a send may wait for its receiver.

    Two ranks: the lower one gives first. A ring: the even ranks give first; with an odd number of ranks the last one
    and rank 0 both give first, and the chain of waits resolves from rank 1 on.
    """
    source = to if source is None else source
    rank = dist.get_rank()
    gives_first = rank < to if to == source else rank % 2 == 0
    if gives_first:
        dist.send(data, to)
    dist.recv(received, source)
    if not gives_first:
        dist.send(data, to)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "only a rank outside the process group gets None"
    return work


def _places(root: int) -> tuple[int, int, Callable[[int], int]]:
    """The world size, this rank's place when counting begins at the root, and the rank at a place.

    Raises:
        ValueError: there is no such root; on every rank, so that none waits.
    """
    size = dist.get_world_size()
    if not 0 <= root < size:
        raise ValueError(f"root {root}: the world has the ranks 0 to {size - 1}")
    return size, (dist.get_rank() - root) % size, lambda place: (place + root) % size


def _powers_of_two(below: int) -> list[int]:
    """1, 2, 4, ... as far as they are less than `below`."""
    return [1 << exponent for exponent in range((below - 1).bit_length())]


def _combination(op: Op, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The element-wise function of an operation.

    Raises:
        ValueError: it is none of `COMBINE`, or torch has none for the type; on every rank, so that none waits.
    """
    for known, function in COMBINE.items():
        if op == known and _can_combine(known, dtype):
            return function
    raise ValueError(
        f"{op} of {dtype}: the collectives combine with SUM, PRODUCT, MAX or MIN, as far as torch has them for a type"
    )


@functools.cache
def _can_combine(op: Op, dtype: torch.dtype) -> bool:
    """Whether torch can: the greatest of complex numbers, for one, is not defined."""
    try:
        number = torch.zeros(1, dtype=dtype)
        ELEMENT_WISE[op](number, number)
    except RuntimeError:
        return False
    return True


def _for_all(parts: Tensor | None, part: Tensor) -> Tensor:
    """`parts`, if it holds one of `part`'s shape for each rank.

    Raises:
        ValueError: it does not; before anything is sent.
    """
    shape = (dist.get_world_size(), *part.shape)
    if parts is None or parts.shape != shape:
        given = "none" if parts is None else f"one {tuple(parts.shape)}"
        raise ValueError(f"a part {tuple(part.shape)} for each rank needs a tensor {shape} on this rank, not {given}")
    return parts
