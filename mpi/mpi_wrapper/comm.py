"""A communicator that counts what it moves, and that can do all-reduce and all-to-all by hand.

All arrays are NumPy's, of any shape, memory order and dtype that MPI knows; `src` and `dst` may be the same array. All
ranks of a communicator call the same method with the same sizes, dtype and operation. What cannot work is refused on
every rank, before anything is sent, so that no rank waits for one that has given up: sizes and dtypes that do not fit,
and operations that ours do not know, with a ValueError; what MPI itself cannot do, with MPI's exception.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Array = NDArray[Any]

COMBINE: list[tuple[MPI.Op, Callable[..., Array]]] = [
    (MPI.SUM, np.add),
    (MPI.PROD, np.multiply),
    (MPI.MAX, np.maximum),
    (MPI.MIN, np.minimum),
]
TAG = 64  # of the messages by hand, so that they are not taken for others between the same ranks


class Communicator:
    """The ranks of an MPI communicator.

    Args:
        comm: the communicator whose ranks take part.

    Attributes:
        comm: the same.
        total_bytes_transferred: what this rank has sent and received so far. Each method says how it counts, with B
            the bytes of `src` and n the number of ranks. For MPI's own operations the count is that of ranks which
            send everything directly to every other; which way MPI takes is not visible from here.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm
        self.total_bytes_transferred = 0

    def Get_size(self) -> int:
        """Number of ranks."""
        return self.comm.Get_size()

    def Get_rank(self) -> int:
        """Number of this rank, from 0."""
        return self.comm.Get_rank()

    def Barrier(self) -> None:
        """Wait until all ranks have come here."""
        self.comm.Barrier()

    def Split(self, key: int = 0, color: int = 0) -> "Communicator":
        """The communicator of the ranks that give the same `color`, ordered by `key`; its count begins at 0.

        By position the key comes first, the other way round than in mpi4py's own `Split`.
        """
        return Communicator(self.comm.Split(color=color, key=key))

    def Allreduce(self, src: Array, dst: Array, op: MPI.Op = MPI.SUM) -> None:
        """Combine all ranks' `src`, element by element, in every rank's `dst`; counts 2 B (n - 1) bytes."""
        with buffers(src, dst, src.size) as (send, receive):
            self.comm.Allreduce(send, receive, op)
        self._count(2 * src.nbytes)

    def Allgather(self, src: Array, dst: Array) -> None:
        """Lay all ranks' `src` side by side in every rank's `dst`; counts (B + bytes of `dst`) (n - 1)."""
        with buffers(src, dst, src.size * self.Get_size()) as (send, receive):
            self.comm.Allgather(send, receive)
        self._count(src.nbytes + dst.nbytes)

    def Reduce_scatter(self, src: Array, dst: Array, op: MPI.Op = MPI.SUM) -> None:
        """Combine all ranks' `src` and give each rank its n-th part; counts (B + bytes of `dst`) (n - 1)."""
        with buffers(src, dst, self._segment(src)) as (send, receive):
            self.comm.Reduce_scatter_block(send, receive, op)
        self._count(src.nbytes + dst.nbytes)

    def Alltoall(self, src: Array, dst: Array) -> None:
        """Give each rank one of `src`'s n segments, and keep what all gave, in rank order; counts 2 B (n - 1) / n."""
        segment = self._segment(src)
        with buffers(src, dst, src.size) as (send, receive):
            self.comm.Alltoall(send, receive)
        self._count(2 * segment * src.itemsize)

    def myAllreduce(self, src: Array, dst: Array, op: MPI.Op = MPI.SUM) -> None:
        """`Allreduce` by hand: rank 0 receives and combines all, then sends the result to all.

        Counts what it sends and receives: 2 B bytes, and 2 B (n - 1) on rank 0, which talks to all others.
        """
        combine = reduce_function(op)
        with buffers(src, dst, src.size) as (send, receive):
            if self.Get_rank() > 0:
                self.comm.Send(send, 0, TAG)
                self.comm.Recv(receive, 0, TAG)
                self.total_bytes_transferred += 2 * src.nbytes
                return
            receive[:] = send
            part = np.empty_like(send)
            for other in range(1, self.Get_size()):
                self.comm.Recv(part, other, TAG)
                combine(receive, part, out=receive)
            for other in range(1, self.Get_size()):
                self.comm.Send(receive, other, TAG)
            self._count(2 * src.nbytes)

    def ringAllreduce(self, src: Array, dst: Array, op: MPI.Op = MPI.SUM) -> None:
        """`Allreduce` by hand: n chunks go round a ring, first to be combined, then to be handed out.

        Counts what it sends and receives. With n equal chunks that is 4 B (n - 1) / n bytes on every rank: less than
        4 B however many ranks there are. A remainder goes to the first chunks, one element each; sizes below n leave
        chunks empty. In each of the two rounds, the rank r sends all chunks but one (the first time r + 1, then r + 2)
        and receives all but one (r, then r + 1).

        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
        """
        combine = reduce_function(op)
        rank, size = self.Get_rank(), self.Get_size()
        with buffers(src, dst, src.size) as (send, receive):
            receive[:] = send
            chunks = np.array_split(receive, size)  # views
            part = np.empty_like(chunks[0])
            for turn in range(2 * (size - 1)):
                out, into = chunks[(rank - turn) % size], chunks[(rank - turn - 1) % size]
                combining = turn < size - 1
                arriving = part[: into.size] if combining else into
                self.comm.Sendrecv(out, (rank + 1) % size, TAG, arriving, (rank - 1) % size, TAG)
                if combining:
                    combine(into, arriving, out=into)
                self.total_bytes_transferred += out.nbytes + into.nbytes

    def myAlltoall(self, src: Array, dst: Array) -> None:
        """`Alltoall` by hand: all sends and receives are started at once, then waited for.

        Counts what it sends and receives: 2 B (n - 1) / n bytes.
        """
        rank, size, segment = self.Get_rank(), self.Get_size(), self._segment(src)
        with buffers(src, dst, src.size) as (send, receive):
            out, into = send.reshape(size, segment), receive.reshape(size, segment)
            into[rank] = out[rank]
            others = [(rank + step) % size for step in range(1, size)]  # not all begin with rank 0
            requests = [self.comm.Irecv(into[other], other, TAG) for other in others]
            requests += [self.comm.Isend(out[other], other, TAG) for other in others]
            MPI.Request.Waitall(requests)
        self._count(2 * segment * src.itemsize)

    def _segment(self, src: Array) -> int:
        """Elements of `src` for each rank."""
        if src.size % self.Get_size():
            raise ValueError(f"src has {src.size} elements, which do not divide among {self.Get_size()} ranks")
        return src.size // self.Get_size()

    def _count(self, bytes_per_other_rank: int) -> None:
        self.total_bytes_transferred += bytes_per_other_rank * (self.Get_size() - 1)


@contextmanager
def buffers(src: Array, dst: Array, size: int) -> Iterator[tuple[Array, Array]]:
    """`src` and `dst` as MPI wants them: flat, in C order, apart in memory. What arrives ends up in `dst`.

    MPI sends memory, not elements: it would take an array in Fortran order for one in another order of elements.

    Raises:
        ValueError: `dst` has not `size` elements of `src`'s dtype.
    """
    if (dst.size, dst.dtype) != (size, src.dtype):
        raise ValueError(f"dst has {dst.size} elements of {dst.dtype}; here it needs {size} of {src.dtype}, as src")
    send, receive = src.ravel(), dst.ravel()  # views where the memory allows it, else copies
    yield send.copy() if np.may_share_memory(send, receive) else send, receive
    if not dst.flags.c_contiguous:
        dst[...] = receive.reshape(dst.shape)


def reduce_function(op: MPI.Op) -> Callable[..., Array]:
    """NumPy's function of an MPI operation.

    Raises:
        ValueError: it is none of `COMBINE`.
    """
    for known, function in COMBINE:
        if op == known:
            return function
    raise ValueError(f"{op}: the all-reduces by hand combine with SUM, PROD, MAX or MIN")
