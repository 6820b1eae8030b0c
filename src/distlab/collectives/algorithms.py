"""Collective operations by hand: how broadcast, reduce, all-reduce and gather travel over several topologies.

All work in place on the caller's tensor, of any dtype and shape, for every world size and root. Apart from the rings in
which all give at the same time, they use only `send`, `recv`, `get_rank`, `get_world_size` and `barrier`, which they
look up on `torch.distributed` when they are called: a stand-in with the same five functions can take its place
(`distlab.collectives.simulation`). `send` may return only when its receiver has taken the message, so wherever two
ranks give each other something with it, one gives first and the other takes first.

Latency and bandwidth of these algorithms: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.collectives.buffers import InPlace, Op, one_for_each_rank, reduce_function, scratch_buffer
from distlab.collectives.ring import allreduce_ring


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
    combine = reduce_function(op, tensor.dtype)
    size = _places(dst)[0]
    with InPlace(tensor, is_changed=dist.get_rank() == dst) as data:
        if dist.get_rank() != dst:
            dist.send(data, dst)
            return
        received = scratch_buffer(data)
        for other in range(size):
            if other != dst:
                dist.recv(received, other)
                combine(data, received, out=data)


def reduce_tree(tensor: Tensor, dst: int, op: Op = ReduceOp.SUM) -> None:
    """Combine all tensors in rank `dst`'s: in each round half of the ranks hand theirs over to the other half."""
    combine = reduce_function(op, tensor.dtype)
    size, place, rank_at = _places(dst)
    with InPlace(tensor, is_changed=place == 0) as data:
        partial = data
        for distance in reversed(_powers_of_two(size)):
            if place < distance and place + distance < size:
                received = scratch_buffer(data)
                dist.recv(received, rank_at(place + distance))
                # Only the root's tensor is the caller's to change.
                partial = combine(partial, received, out=data if place == 0 else scratch_buffer(data, 1))
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
    combine = reduce_function(op, tensor.dtype)
    rank, size = dist.get_rank(), dist.get_world_size()
    core = 1 << (size.bit_length() - 1)
    with InPlace(tensor) as data:
        if rank >= core:
            dist.send(data, rank - core)
            dist.recv(data, rank - core)
            return
        received = scratch_buffer(data)
        if rank + core < size:
            dist.recv(received, rank + core)
            combine(data, received, out=data)
        for distance in _powers_of_two(core):
            _exchange(data, received, rank ^ distance)
            combine(data, received, out=data)
        if rank + core < size:
            dist.send(data, rank + core)


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
    with InPlace(one_for_each_rank(gathered, tensor)) as parts:
        for other in range(size):
            if other == dst:
                parts[other] = tensor.detach()
            else:
                dist.recv(parts[other], other)


def gather_tree(tensor: Tensor, gathered: Tensor | None, dst: int) -> None:
    """Collect all tensors on rank `dst`: in each round half of the ranks hand over all that they have collected."""
    size, place, rank_at = _places(dst)
    if place > 0:
        _collect(tensor, scratch_buffer(tensor, count=size - place), place, rank_at)
        return
    with InPlace(one_for_each_rank(gathered, tensor)) as whole:
        if dst == 0:  # places are ranks
            _collect(tensor, whole, place, rank_at)
            return
        parts = scratch_buffer(tensor, count=size)
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
    gather_naive(tensor, one_for_each_rank(gathered, tensor), 0)
    broadcast_naive(gathered, 0)


def allgather_tree(tensor: Tensor, gathered: Tensor) -> None:
    """Collect all tensors on every rank, `gathered` (world size, *shape of `tensor`): up a tree and down again."""
    gather_tree(tensor, one_for_each_rank(gathered, tensor), 0)
    broadcast_tree(gathered, 0)


def allgather_ring(tensor: Tensor, gathered: Tensor) -> None:
    """Collect all tensors on every rank, `gathered` (world size, *shape of `tensor`): they go round the ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with InPlace(one_for_each_rank(gathered, tensor)) as parts:
        parts[rank] = tensor.detach()
        for turn in range(size - 1):
            known, missing = (rank - turn) % size, (rank - turn - 1) % size
            shift(parts[known], parts[missing])


def reducescatter_naive(tensor: Tensor, scattered: Tensor, op: Op = ReduceOp.SUM) -> None:
    """Combine all tensors and give each rank its block: rank 0 combines all and sends the blocks.

    Args:
        tensor: (world size, *shape of `scattered`), a block for each rank; stays as it is.
        scattered: this rank's block of the result.
        op: how to combine.
    """
    tensor = one_for_each_rank(tensor, scattered).detach()
    combined = scratch_buffer(tensor, 1).copy_(tensor) if dist.get_rank() == 0 else tensor
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
    combine = reduce_function(op, tensor.dtype)
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = one_for_each_rank(tensor, scattered).detach()
    with InPlace(scattered) as block:
        partial = tensor[(rank - 1) % size].contiguous()
        spaces = scratch_buffer(block), scratch_buffer(block, 1)  # what is sent on was received the turn before
        for turn in range(size - 1):
            received = spaces[turn % 2]
            shift(partial, received)
            is_last = turn == size - 2  # `scattered` may be a part of `tensor`: it is not changed before
            partial = combine(received, tensor[(rank - turn - 2) % size], out=block if is_last else received)
        if size == 1:
            block.copy_(partial)


def _exchange(data: Tensor, received: Tensor, other: int) -> None:
    """Send to a rank and receive from it, though a send may wait for its receiver: the lower rank gives first."""
    gives_first = dist.get_rank() < other
    if gives_first:
        dist.send(data, other)
    dist.recv(received, other)
    if not gives_first:
        dist.send(data, other)


def shift(data: Tensor, received: Tensor) -> None:
    """Send to the next rank of the ring and receive from the one before, at the same time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    receive, send = dist.irecv(received, (rank - 1) % size), dist.isend(data, (rank + 1) % size)
    for message in (receive, send):
        assert message is not None, "only a rank outside the process group gets None"
        message.wait()


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
