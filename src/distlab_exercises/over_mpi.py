"""Tries the functions and methods of the chapter on MPI, without mpirun: ranks are threads of a simulated world."""

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ReduceOp

from distlab.collectives.simulation import SimulatedEndpoint, SimulatedWorld
from distlab_exercises.collectives import name_difference, simulate
from distlab_exercises.loading import Solution
from distlab_exercises.verdict import Wrong, expect, where
from simplellm.errors import require

Array = NDArray[Any]
RANKS = 4
GRIDS = [(1, 4), (2, 2), (4, 1)]  # ranks that share a model, copies of it
BATCH, SEQ, WIDTH = 2, 3, 8  # of whole activations
SIZES, ELEMENTS = (1, 2, 3, 4), (24, 25)  # ranks, elements: divisible among all of them, and among few


class Communicator:
    """Ranks of a simulated world, with the methods of mpi4py's communicators that the chapter uses.

    Args:
        given: the input of each rank of the world to a collective, shared by all of them; None if there are none.
    """

    def __init__(
        self, endpoint: SimulatedEndpoint, given: dict[int, Array] | None, ranks: list[int] | None = None
    ) -> None:
        self._endpoint, self._given = endpoint, given
        self.ranks = ranks or list(range(endpoint.get_world_size()))

    def Get_rank(self) -> int:
        return self.ranks.index(self._endpoint.get_rank())

    def Get_size(self) -> int:
        return len(self.ranks)

    def _gathered(self, array: Array) -> list[Array]:
        """Return the ranks' inputs; all ranks of the world must call a collective, in any communicator."""
        if self._given is None:
            raise Wrong("no-messages", "calls a collective of MPI's; write it with Send, Recv, Sendrecv, Isend, Irecv")
        require(array.flags.c_contiguous, CONTIGUOUS)
        self._given[self._endpoint.get_rank()] = array.copy()
        self._endpoint.barrier()
        arrays = [self._given[rank] for rank in self.ranks]
        self._endpoint.barrier()
        return arrays

    def Split(self, color: int = 0, key: int = 0) -> "Communicator":
        given = self._gathered(np.array([color, key]))
        same = [(k, rank) for (c, k), rank in zip(given, self.ranks, strict=True) if c == color]
        return Communicator(self._endpoint, self._given, [rank for _, rank in sorted(same)])

    # The parameters have mpi4py's names, as a solution may give them by name.

    def Allgather(self, sendbuf: Array, recvbuf: Array) -> None:
        recvbuf[...] = np.stack(self._gathered(sendbuf)).reshape(recvbuf.shape)

    def Reduce_scatter(self, sendbuf: Array, recvbuf: Array, recvcounts: object = None, op: object = None) -> None:
        total = sum(self._gathered(sendbuf))
        recvbuf[...] = np.reshape(total, (len(self.ranks), *recvbuf.shape))[self.Get_rank()]

    def Allreduce(self, sendbuf: Array, recvbuf: Array, op: object = None) -> None:
        recvbuf[...] = sum(self._gathered(sendbuf))

    def Send(self, buf: Array, dest: int, tag: int = 0) -> None:
        self.Isend(buf, dest, tag).Wait()

    def Recv(self, buf: Array, source: int, tag: int = 0) -> None:
        self.Irecv(buf, source, tag).Wait()

    def Sendrecv(
        self,
        sendbuf: Array,
        dest: int,
        sendtag: int = 0,
        recvbuf: Array | None = None,
        source: int | None = None,
        recvtag: int | None = None,
    ) -> None:
        require(recvbuf is not None and source is not None, "Sendrecv: give recvbuf, and source, the rank it is from")
        assert recvbuf is not None
        assert source is not None
        tag = sendtag if recvtag is None else recvtag  # mpi4py takes any; the ranks send with the same
        for request in (self.Irecv(recvbuf, source, tag), self.Isend(sendbuf, dest, sendtag)):
            request.Wait()

    def Isend(self, buf: Array, dest: int, tag: int = 0) -> "Message":
        return Message(self._endpoint.isend(_tensor(buf), self.ranks[dest], tag))

    def Irecv(self, buf: Array, source: int, tag: int = 0) -> "Message":
        return Message(self._endpoint.irecv(_tensor(buf), self.ranks[source], tag))


class Message:
    """A message that was started, with mpi4py's names for waiting."""

    def __init__(self, message: Any) -> None:
        self.Wait = self.wait = message.wait

    @staticmethod
    def Waitall(requests: "list[Message]") -> None:
        for request in requests:
            request.Wait()


CONTIGUOUS = "MPI sends memory, not elements: give a contiguous array (np.ascontiguousarray)"


def _tensor(array: Array) -> torch.Tensor:
    """Return the array's own memory."""
    require(array.flags.c_contiguous, CONTIGUOUS)
    return torch.from_numpy(array)


def _load(solution: Solution) -> Any:
    """Return a student's file, with MPI's constants only."""
    try:
        importlib.import_module("mpi4py").rc.initialize = False
    except ImportError:
        raise Wrong("no-mpi", "this exercise needs mpi4py: pip install mpi4py mpich") from None
    return solution.module


def try_function(solution: Solution) -> list[str]:
    """Compare one of the functions of a student's file with what NumPy computes from the whole arrays."""
    student = _load(solution)
    for mp_size, dp_size in GRIDS:
        with where(f"mp_size {mp_size}, dp_size {dp_size}"):
            simulate(SimulatedWorld(RANKS), functools.partial(_call, student, solution.name, mp_size, dp_size, {}))
    return ["right on every rank of every grid"]


def _call(
    student: Any, name: str, mp_size: int, dp_size: int, given: dict[int, Array], endpoint: SimulatedEndpoint
) -> None:
    """Call a function on a rank, and compare its result."""
    rank, world = endpoint.get_rank(), Communicator(endpoint, given)
    model, copy = rank % mp_size, rank // mp_size
    group = world.Split(color=copy, key=rank)
    whole, width = np.random.default_rng(copy).integers(-9, 10, (BATCH, SEQ, WIDTH)).astype(float), WIDTH // mp_size
    own = slice(model * width, (model + 1) * width)
    with where(f"rank {rank}"):
        if name == "get_info":
            _check_info(student, world, rank, mp_size, dp_size)
        elif name == "naive_collect_backward_output":
            _compare(student.naive_collect_backward_output(whole, model, mp_size), whole[..., own], "its own slice")
        elif name == "naive_collect_backward_x":
            terms = [whole * (other + 1) for other in range(mp_size)]
            right = np.sum(terms, axis=0)[..., own]
            result = student.naive_collect_backward_x(terms[model], group, mp_size)
            _compare(result, right, "its own slice of the sum over the ranks")
        else:
            result = getattr(student, name)(np.ascontiguousarray(whole[..., own]), group, mp_size)
            _compare(result, whole, "all ranks' parts, in the order of ranks")


def _compare(result: object, right: Array, what: str) -> None:
    if not isinstance(result, np.ndarray):
        raise Wrong("wrong-result", f"returned {type(result).__name__}, and should return {what}")
    told = f"returned {result.shape}, and should return {what}: {right.shape}"
    expect(result.shape == right.shape, "wrong-result", told)
    expect(np.allclose(result, right), "wrong-result", f"returned other numbers than {what}")


def _check_info(student: Any, world: Communicator, rank: int, mp_size: int, dp_size: int) -> None:
    for layer in ("fc_q", "fc_o"):
        result = student.get_info(world, rank, mp_size, dp_size, layer, 4 * RANKS, 8 * RANKS)
        is_six = isinstance(result, tuple) and len(result) == 6
        expect(is_six, "wrong-result", "returned something else than a tuple of six")
        mp_idx, dp_idx, mp_comm, dp_comm, in_dim, out_dim = result
        split = (4 * RANKS, 8 * RANKS // mp_size) if layer != "fc_o" else (4 * RANKS // mp_size, 8 * RANKS)
        for what, got, right in (
            ("mp_idx", mp_idx, rank % mp_size),
            ("dp_idx", dp_idx, rank // mp_size),
            ("the ranks of mp_comm", mp_comm.ranks, [r for r in range(RANKS) if r // mp_size == rank // mp_size]),
            ("the ranks of dp_comm", dp_comm.ranks, [r for r in range(RANKS) if r % mp_size == rank % mp_size]),
            (f"part_in_dim of {layer}", in_dim, split[0]),
            (f"part_out_dim of {layer}", out_dim, split[1]),
        ):
            expect(got == right, "wrong-result", f"gets {what} {got} instead of {right}")


def try_method(solution: Solution) -> list[str]:
    """Compare a method of a student's communicator with the right result, and with the bytes that it should count."""
    name, student = solution.name, _load(solution)
    operations = {operation: getattr(student.MPI, operation) for operation in ("SUM", "PROD", "MAX", "MIN")}
    student.MPI = SimpleNamespace(Request=Message, **operations)
    trials = [(24, "SUM")] if name == "myAlltoall" else [*((elements, "SUM") for elements in ELEMENTS), (24, "MAX")]
    for size in SIZES:
        for elements, op in trials:
            with where(f"{size} rank{'s' * (size > 1)}, {elements} elements{', MAX of int32' * (op == 'MAX')}"):
                _try_method(student, name, size, elements, op)
    return ["right on every rank, and the bytes that were moved are counted"]


def _try_method(student: Any, name: str, size: int, elements: int, op: str) -> None:
    dtype, combine = (float, np.sum) if op == "SUM" else (np.int32, np.max)
    given = [np.random.default_rng(r).integers(-9, 10, elements).astype(dtype) for r in range(size)]

    def call(endpoint: SimulatedEndpoint) -> int:
        """Return the bytes that a rank reports as sent and received."""
        rank = endpoint.get_rank()
        own, result = given[rank].copy(), np.full(elements, -77, dtype)  # which is no result
        world = student.Communicator(Communicator(endpoint, None))
        getattr(world, name)(own, result, *([getattr(student.MPI, op)] if op != "SUM" else []))  # by default, SUM
        expect(np.array_equal(own, given[rank]), "changed", f"rank {rank} has another `src` than before")
        inputs, found = [torch.from_numpy(array).float() for array in given], torch.from_numpy(result).float()
        if name == "myAlltoall":
            blocks = [x.view(size, -1) for x in inputs]
            right = torch.stack([x[rank] for x in blocks])
            name_difference("alltoall", rank, found.view(size, -1), right, blocks, None, op)
        else:
            right = torch.from_numpy(combine(given, axis=0)).float()
            name_difference("allreduce", rank, found, right, inputs, None, getattr(ReduceOp, op))
        return int(world.total_bytes_transferred)

    world = SimulatedWorld(size)
    counted = simulate(world, call)
    moved = [counts.sent_bytes + counts.received_bytes for counts in world.counts]
    for rank in range(size):
        told = f"rank {rank} counts {counted[rank]:,} bytes, and has sent and received {moved[rank]:,}"
        expect(counted[rank] == moved[rank], "count", told)
    needed = 4 * (size - 1) * -(-elements // size) * (8 if op == "SUM" else 4)
    told = f"a rank sends and receives {max(moved):,} bytes; around a ring, {needed:,} are enough"
    expect(name != "ringAllreduce" or max(moved) <= needed, "slow", told)
