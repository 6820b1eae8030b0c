"""A communicator that counts bytes, and has a handwritten all-reduce and all-to-all.

All arrays are NumPy's, of any shape, memory order and dtype that MPI knows; `src` and `dst` may be the same array. All
ranks of a communicator call the same method with the same sizes, dtype and operation. Arguments that cannot work raise
an error on every rank, before anything is sent, so that no rank waits for another that has given up. It is a ValueError
for sizes and dtypes that do not match and for operations that the handwritten methods do not know, and MPI's exception
for what MPI itself cannot do.
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
TAG = 64  # of the handwritten methods' messages, which are not to be confused with others between the same ranks


class Communicator:
    """Wraps an MPI communicator.

    Args:
        comm: the communicator to wrap.

    Attributes:
        comm: the same.
        total_bytes_transferred: bytes that this rank has sent and received so far. Each method says how it counts; B is
            the number of bytes of `src`, n the number of ranks. MPI does not tell which algorithm it uses, so for its
            own operations the count is that of ranks which send everything directly to every other rank.
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
        """Wait until all ranks have called this."""
        self.comm.Barrier()

    def Split(self, key: int = 0, color: int = 0) -> "Communicator":
        """The communicator of the ranks that give the same `color`, ordered by `key`; its count begins at 0.

        The order of the positional arguments is not that of mpi4py's own `Split`, in which `color` comes first.
        """
        return Communicator(self.comm.Split(color=color, key=key))

    def Allreduce(self, src: Array, dst: Array, op: MPI.Op = MPI.SUM) -> None:
        """Combine all ranks' `src`, element by element, into every rank's `dst`; counts 2 B (n - 1) bytes."""
        with buffers(src, dst, src.size) as (send, receive):
            self.comm.Allreduce(send, receive, op)
        self._count(2 * src.nbytes)

    def Allgather(self, src: Array, dst: Array) -> None:
        """Concatenate all ranks' `src` in every rank's `dst`; counts (B + bytes of `dst`) (n - 1)."""
        with buffers(src, dst, src.size * self.Get_size()) as (send, receive):
            self.comm.Allgather(send, receive)
        self._count(src.nbytes + dst.nbytes)

    def Reduce_scatter(self, src: Array, dst: Array, op: MPI.Op = MPI.SUM) -> None:
        """Combine all ranks' `src` and give each rank its n-th part; counts (B + bytes of `dst`) (n - 1)."""
        with buffers(src, dst, self._segment(src)) as (send, receive):
            self.comm.Reduce_scatter_block(send, receive, op)
        self._count(src.nbytes + dst.nbytes)

    def Alltoall(self, src: Array, dst: Array) -> None:
        """Send each rank one of the n segments of `src`, and receive one from each; counts 2 B (n - 1) / n."""
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
        """`Allreduce` by hand: n chunks go twice around a ring, first to be combined, then to be distributed.

        Counts what it sends and receives. With n equal chunks that is 4 B (n - 1) / n bytes on every rank: less than
        4 B for any number of ranks. If the size is not a multiple of n, the first chunks have one element more; if it
        is less than n, the last chunks are empty. On the first way around, rank r sends all chunks except r + 1 and
        receives all except r; on the second way, it sends all except r + 2 and receives all except r + 1.

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
            others = [(rank + step) % size for step in range(1, size)]  # so that not all ranks begin with rank 0
            requests = [self.comm.Irecv(into[other], other, TAG) for other in others]
            requests += [self.comm.Isend(out[other], other, TAG) for other in others]
            MPI.Request.Waitall(requests)
        self._count(2 * segment * src.itemsize)

    def _segment(self, src: Array) -> int:
        """Number of elements of `src` for each rank."""
        if src.size % self.Get_size():
            raise ValueError(f"src has {src.size} elements, which do not divide among {self.Get_size()} ranks")
        return src.size // self.Get_size()

    def _count(self, bytes_per_other_rank: int) -> None:
        self.total_bytes_transferred += bytes_per_other_rank * (self.Get_size() - 1)


@contextmanager
def buffers(src: Array, dst: Array, size: int) -> Iterator[tuple[Array, Array]]:
    """`src` and `dst` as MPI needs them: flat, in C order, in separate memory. At the end `dst` has the result.

    MPI sends memory as it is: the elements of an array in Fortran order would arrive in the wrong order.

    Raises:
        ValueError: `dst` does not have `size` elements of the dtype of `src`.
    """
    if (dst.size, dst.dtype) != (size, src.dtype):
        raise ValueError(f"dst has {dst.size} elements of {dst.dtype}; here it needs {size} of {src.dtype}, as src")
    send, receive = src.ravel(), dst.ravel()  # views of arrays in C order, else copies
    yield send.copy() if np.may_share_memory(send, receive) else send, receive
    if not dst.flags.c_contiguous:
        dst[...] = receive.reshape(dst.shape)


def reduce_function(op: MPI.Op) -> Callable[..., Array]:
    """NumPy's function for an MPI operation.

    Raises:
        ValueError: the operation is not in `COMBINE`.
    """
    for known, function in COMBINE:
        if op == known:
            return function
    raise ValueError(f"{op}: the all-reduces by hand combine with SUM, PROD, MAX or MIN")
