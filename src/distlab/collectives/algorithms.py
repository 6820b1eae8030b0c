"""Handwritten collectives: broadcast, reduce, all-reduce, gather, reduce-scatter, all-to-all, in several topologies.

All of them work in place on the caller's tensor, of any dtype and shape, for every world size and root. They send and
receive through an endpoint. The default endpoint is `torch.distributed` itself, whose functions are looked up at each
call. Broadcast, reduce and all-reduce, except for the ring, use only its `send`, `recv`, `get_rank` and
`get_world_size`, and work whether or not a `send` waits for its receiver:

- where two ranks send to each other, one of them sends first and the other receives first;
- a call does not change memory that it has sent until the message has certainly arrived, and it does not send memory
  that the next call may change.

For the latency and bandwidth of these algorithms see Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", 2005.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.collectives.buffers import Op, in_place, one_for_each_rank, reduce_function, scratch_buffer
from distlab.collectives.ring import allreduce_ring
from distlab.comm.endpoint import Endpoint


def broadcast_naive(tensor: Tensor, src: int, endpoint: Endpoint = dist) -> None:
    """Copy the tensor of rank `src` to all ranks: the root sends to one rank after another."""
    size, relative_rank, rank_at = _ranks_from(src, endpoint)
    with in_place(tensor) as data:
        if relative_rank > 0:
            endpoint.recv(data, src)
            return
        for other in map(rank_at, range(1, size)):
            endpoint.send(data, other)


def broadcast_tree(tensor: Tensor, src: int, endpoint: Endpoint = dist) -> None:
    """Copy the tensor of rank `src` to all ranks: in each round, every rank that has it sends it to one without it."""
    size, relative_rank, rank_at = _ranks_from(src, endpoint)
    with in_place(tensor) as data:
        for distance in _powers_of_two(size):
            if relative_rank < distance and relative_rank + distance < size:
                endpoint.send(data, rank_at(relative_rank + distance))
            elif distance <= relative_rank < 2 * distance:
                endpoint.recv(data, rank_at(relative_rank - distance))


def broadcast_ring(tensor: Tensor, src: int, endpoint: Endpoint = dist) -> None:
    """Copy the tensor of rank `src` to all ranks: each rank passes it to the next one."""
    size, relative_rank, rank_at = _ranks_from(src, endpoint)
    with in_place(tensor) as data:
        if relative_rank > 0:
            endpoint.recv(data, rank_at(relative_rank - 1))
        if relative_rank < size - 1:
            endpoint.send(data, rank_at(relative_rank + 1))


def reduce_naive(tensor: Tensor, dst: int, op: Op = ReduceOp.SUM, endpoint: Endpoint = dist) -> None:
    """Combine all tensors into rank `dst`'s, which receives one after another. Other ranks' tensors do not change."""
    combine = reduce_function(op, tensor.dtype)
    size, relative_rank, _ = _ranks_from(dst, endpoint)
    with in_place(tensor, is_changed=relative_rank == 0) as data:
        if relative_rank > 0:
            endpoint.send(data, dst)
            return
        received = scratch_buffer(data)
        for other in (other for other in range(size) if other != dst):
            endpoint.recv(received, other)
            combine(data, received, out=data)


def reduce_tree(tensor: Tensor, dst: int, op: Op = ReduceOp.SUM, endpoint: Endpoint = dist) -> None:
    """Combine all tensors into rank `dst`'s: in each round, half of the remaining ranks send to the other half."""
    combine = reduce_function(op, tensor.dtype)
    size, relative_rank, rank_at = _ranks_from(dst, endpoint)
    with in_place(tensor, is_changed=relative_rank == 0) as data:
        partial = data
        for distance in reversed(_powers_of_two(size)):
            if relative_rank < distance and relative_rank + distance < size:
                received = scratch_buffer(data)
                endpoint.recv(received, rank_at(relative_rank + distance))
                # Only the root's tensor may change. The other ranks send their sums, which need separate memory: the
                # next call might change a scratch buffer before the message has arrived.
                into = torch.empty_like(data) if partial is data and relative_rank > 0 else partial
                partial = combine(partial, received, out=into)
            elif distance <= relative_rank < 2 * distance:
                endpoint.send(partial, rank_at(relative_rank - distance))


def allreduce_naive(tensor: Tensor, op: Op = ReduceOp.SUM, endpoint: Endpoint = dist) -> None:
    """Combine all tensors on every rank: all ranks send to rank 0, which sends the result to all."""
    reduce_naive(tensor, 0, op, endpoint)
    broadcast_naive(tensor, 0, endpoint)


def allreduce_tree(tensor: Tensor, op: Op = ReduceOp.SUM, endpoint: Endpoint = dist) -> None:
    """Combine all tensors on every rank: up a tree to rank 0, and down again."""
    reduce_tree(tensor, 0, op, endpoint)
    broadcast_tree(tensor, 0, endpoint)


def allreduce_butterfly(tensor: Tensor, op: Op = ReduceOp.SUM, endpoint: Endpoint = dist) -> None:
    """Combine all tensors on every rank: in round k, ranks whose numbers differ in bit k exchange partial results.

    If the world size is not a power of two, the ranks beyond the largest one first send their tensors to the others,
    and receive the result at the end.
    """
    combine = reduce_function(op, tensor.dtype)
    rank, size = endpoint.get_rank(), endpoint.get_world_size()
    core = 1 << (size.bit_length() - 1)
    with in_place(tensor) as data:
        if rank >= core:
            endpoint.send(data, rank - core)
            endpoint.recv(data, rank - core)
            return
        received = scratch_buffer(data)
        if rank + core < size:
            endpoint.recv(received, rank + core)
            combine(data, received, out=data)
        for partner in (rank ^ distance for distance in _powers_of_two(core)):
            if rank < partner:
                endpoint.send(data, partner)
                endpoint.recv(received, partner)  # the partner sends this only after `data` has arrived
            else:
                endpoint.recv(received, partner)
                endpoint.send(data.clone(), partner)  # a copy: `data` changes before its arrival is confirmed
            combine(data, received, out=data)
        if rank + core < size:
            endpoint.send(data, rank + core)


ALL_REDUCES = dict(naive=allreduce_naive, tree=allreduce_tree, butterfly=allreduce_butterfly, ring=allreduce_ring)


def gather_naive(tensor: Tensor, gathered: Tensor | None, dst: int, endpoint: Endpoint = dist) -> None:
    """Collect all tensors on rank `dst`, one by one, in `gathered` (world size, *shape of `tensor`; None elsewhere)."""
    size, relative_rank, rank_at = _ranks_from(dst, endpoint)
    if relative_rank > 0:
        endpoint.send(tensor.detach().contiguous(), dst)
        return
    with in_place(one_for_each_rank(gathered, tensor, size)) as parts:
        parts[dst] = tensor.detach()
        for other in map(rank_at, range(1, size)):
            endpoint.recv(parts[other], other)


def gather_tree(tensor: Tensor, gathered: Tensor | None, dst: int, endpoint: Endpoint = dist) -> None:
    """Collect all tensors on rank `dst`: in each round, half of the remaining ranks send everything that they have."""
    size, relative_rank, rank_at = _ranks_from(dst, endpoint)

    def collect(parts: Tensor) -> None:
        """Collect the parts of this rank and those after it, and send them unless this is the root."""
        parts[0] = tensor.detach()
        for distance in _powers_of_two(size):
            if relative_rank % (2 * distance):
                endpoint.send(parts[:distance], rank_at(relative_rank - distance))
                return
            if distance < len(parts):
                endpoint.recv(parts[distance : 2 * distance], rank_at(relative_rank + distance))

    if relative_rank > 0:
        collect(scratch_buffer(tensor, count=size - relative_rank))
        return
    with in_place(one_for_each_rank(gathered, tensor, size)) as whole:
        parts = whole if dst == 0 else scratch_buffer(tensor, count=size)  # for dst 0 the order is already right
        collect(parts)
        if dst > 0:
            whole[dst:], whole[:dst] = parts[: size - dst], parts[size - dst :]


def allgather_naive(tensor: Tensor, gathered: Tensor, endpoint: Endpoint = dist) -> None:
    """Collect all tensors on every rank, in `gathered` (world size, *shape of `tensor`): through rank 0."""
    gather_naive(tensor, one_for_each_rank(gathered, tensor, endpoint.get_world_size()), 0, endpoint)
    broadcast_naive(gathered, 0, endpoint)


def allgather_tree(tensor: Tensor, gathered: Tensor, endpoint: Endpoint = dist) -> None:
    """Collect all tensors on every rank, in `gathered` (world size, *shape of `tensor`): up a tree and down again."""
    gather_tree(tensor, one_for_each_rank(gathered, tensor, endpoint.get_world_size()), 0, endpoint)
    broadcast_tree(gathered, 0, endpoint)


def allgather_ring(tensor: Tensor, gathered: Tensor, endpoint: Endpoint = dist) -> None:
    """Collect all tensors on every rank, in `gathered` (world size, *shape of `tensor`): around the ring."""
    rank, size = endpoint.get_rank(), endpoint.get_world_size()
    with in_place(one_for_each_rank(gathered, tensor, size)) as parts:
        parts[rank] = tensor.detach()
        for turn in range(size - 1):
            shift(parts[(rank - turn) % size], parts[(rank - turn - 1) % size], endpoint)


def reducescatter_naive(tensor: Tensor, scattered: Tensor, op: Op = ReduceOp.SUM, endpoint: Endpoint = dist) -> None:
    """Combine all tensors and give each rank its block: rank 0 combines them and sends the blocks.

    `tensor` (world size, *shape of `scattered`) has a block for each rank, and is not changed.
    """
    rank, size = endpoint.get_rank(), endpoint.get_world_size()
    tensor = one_for_each_rank(tensor, scattered, size).detach()
    combined = scratch_buffer(tensor, 1).copy_(tensor) if rank == 0 else tensor
    reduce_naive(combined, 0, op, endpoint)
    with in_place(scattered) as block:
        if rank > 0:
            endpoint.recv(block, 0)
            return
        for other in range(1, size):
            endpoint.send(combined[other].contiguous(), other)
        block.copy_(combined[0])


def reducescatter_ring(tensor: Tensor, scattered: Tensor, op: Op = ReduceOp.SUM, endpoint: Endpoint = dist) -> None:
    """Like `reducescatter_naive`, but partial sums travel around the ring to the rank that keeps them."""
    combine = reduce_function(op, tensor.dtype)
    rank, size = endpoint.get_rank(), endpoint.get_world_size()
    tensor = one_for_each_rank(tensor, scattered, size).detach()
    with in_place(scattered) as block:
        partial = tensor[(rank - 1) % size].contiguous()
        buffers = scratch_buffer(block), scratch_buffer(block, 1)  # one is sent while the other receives
        for turn in range(size - 1):
            received = buffers[turn % 2]
            shift(partial, received, endpoint)
            is_last = turn == size - 2  # `scattered` may be a part of `tensor`, so it must not change earlier
            partial = combine(received, tensor[(rank - turn - 2) % size], out=block if is_last else received)
        if size == 1:
            block.copy_(partial)


def alltoall_naive(parts: Sequence[Tensor], received: Sequence[Tensor], endpoint: Endpoint = dist) -> None:
    """Send `parts[r]` to rank r, and receive its part for this rank in `received[r]`; one rank sends after another.

    Parts may have different sizes, also none; rank r's part for this rank has the size of `received[r]`.
    """
    rank, size = endpoint.get_rank(), endpoint.get_world_size()
    received[rank].detach().copy_(parts[rank].detach())
    for source in range(size):
        for target in (other for other in range(size) if other != source):
            if rank == source:
                endpoint.send(parts[target].detach().contiguous(), target)
            elif rank == target:
                with in_place(received[source]) as data:
                    endpoint.recv(data, source)


def alltoall_pairwise(parts: Sequence[Tensor], received: Sequence[Tensor], endpoint: Endpoint = dist) -> None:
    """Like `alltoall_naive`, but in turn t all ranks send at once, each to the rank t places after it."""
    rank, size = endpoint.get_rank(), endpoint.get_world_size()
    received[rank].detach().copy_(parts[rank].detach())
    for turn in range(1, size):
        target, source = (rank + turn) % size, (rank - turn) % size
        with in_place(received[source]) as data:
            own = parts[target].detach().contiguous()
            for message in (endpoint.irecv(data, source), endpoint.isend(own, target)):
                message.wait()


def shift(data: Tensor, received: Tensor, endpoint: Endpoint = dist) -> None:
    """Send to the next rank of the ring and receive from the previous one at the same time."""
    rank, size = endpoint.get_rank(), endpoint.get_world_size()
    for message in (endpoint.irecv(received, (rank - 1) % size), endpoint.isend(data, (rank + 1) % size)):
        message.wait()


def _ranks_from(root: int, endpoint: Endpoint) -> tuple[int, int, Callable[[int], int]]:
    """Return the world size, this rank's number relative to the root, and a function from relative numbers to ranks.

    Raises:
        ValueError: there is no such root; raised on every rank, so that none waits.
    """
    size = endpoint.get_world_size()
    if not 0 <= root < size:
        raise ValueError(f"root {root}: the world has the ranks 0 to {size - 1}")
    return size, (endpoint.get_rank() - root) % size, lambda relative_rank: (relative_rank + root) % size


def _powers_of_two(below: int) -> list[int]:
    return [1 << exponent for exponent in range((below - 1).bit_length())]
