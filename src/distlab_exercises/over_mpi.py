"""Tries the functions and methods of the chapter on MPI, without mpirun: ranks are threads of a simulated world."""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distlab.collectives.algorithms import allgather_ring, reducescatter_ring
from distlab.collectives.simulation import SimulatedEndpoint, SimulatedWorld
from distlab_exercises.collectives import simulate
from distlab_exercises.loading import load
from distlab_exercises.verdict import Verdict
from simplellm.errors import require

Array = NDArray[Any]
RANKS = 4
GRIDS = [(1, 4), (2, 2), (4, 1)]  # ranks that share a model, copies of it
BATCH, SEQ, WIDTH = 2, 3, 8  # of whole activations
SIZES, ELEMENTS = (1, 2, 3, 4), (24, 25)  # ranks, elements: divisible among all of them, and among few


class Communicator:
    """Ranks of a simulated world, with the methods of mpi4py's communicators that the chapter uses."""

    def __init__(self, endpoint: SimulatedEndpoint, ranks: list[int] | None = None) -> None:
        self._endpoint, self.ranks = endpoint, ranks or list(range(endpoint.get_world_size()))

    def get_rank(self) -> int:
        return self.ranks.index(self._endpoint.get_rank())

    def get_world_size(self) -> int:
        return len(self.ranks)

    def isend(self, tensor: torch.Tensor, dst: int) -> Any:
        return self._endpoint.isend(tensor, self.ranks[dst])

    def irecv(self, tensor: torch.Tensor, src: int) -> Any:
        return self._endpoint.irecv(tensor, self.ranks[src])

    def Get_rank(self) -> int:
        return self.get_rank()

    def Get_size(self) -> int:
        return len(self.ranks)

    def Split(self, color: int = 0, key: int = 0) -> "Communicator":
        given = np.empty((len(self.ranks), 2))
        self.Allgather(np.array([color, key], dtype=float), given)
        same = [(k, rank) for (c, k), rank in zip(given.tolist(), self.ranks, strict=True) if c == color]
        return Communicator(self._endpoint, [rank for _, rank in sorted(same)])

    # The parameters have mpi4py's names, as a solution may give them by name.

    def Allgather(self, sendbuf: Array, recvbuf: Array) -> None:
        own, parts = torch.from_numpy(_flat(sendbuf)), torch.empty(len(self.ranks), sendbuf.size, dtype=torch.float64)
        if len(self.ranks) == 1:
            parts[0] = own
        else:
            allgather_ring(own, parts, self)  # type: ignore[arg-type]
        recvbuf[...] = parts.numpy().reshape(recvbuf.shape)

    def Reduce_scatter(self, sendbuf: Array, recvbuf: Array, recvcounts: object = None, op: object = None) -> None:
        blocks = torch.from_numpy(_flat(sendbuf)).view(len(self.ranks), -1)
        own = torch.empty(blocks.shape[1], dtype=torch.float64)
        reducescatter_ring(blocks, own, endpoint=self)  # type: ignore[arg-type]
        recvbuf[...] = own.numpy().reshape(recvbuf.shape)

    def Allreduce(self, sendbuf: Array, recvbuf: Array, op: object = None) -> None:
        parts = np.empty((len(self.ranks), *sendbuf.shape))
        self.Allgather(sendbuf, parts)
        recvbuf[...] = parts.sum(0)

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


def _tensor(array: Array) -> torch.Tensor:
    """The array's own memory."""
    require(array.flags.c_contiguous, "MPI sends memory, not elements: give a contiguous array (np.ascontiguousarray)")
    return torch.from_numpy(array)


def _flat(array: Array) -> Array:
    require(array.flags.c_contiguous, "MPI sends memory, not elements: give a contiguous array (np.ascontiguousarray)")
    return array.astype(np.float64).ravel()


def try_mpi(script: Path, module: str, name: str) -> Verdict:
    """Compare one of the functions of a student's file with what NumPy computes from the whole arrays."""
    del module
    if (student := _load(script)) is None:
        return _no_mpi(name)
    verdict = Verdict(f"{name}: {RANKS} ranks in three grids")
    for mp_size, dp_size in GRIDS:
        world = SimulatedWorld(RANKS)
        grid = f"mp_size {mp_size}, dp_size {dp_size}"
        told, halted = simulate(world, functools.partial(_call, student, name, mp_size, dp_size))
        if halted is not None:
            return verdict.fails(halted[0], [f"{grid}: {halted[1]}"])
        for number, sentence in enumerate(told):
            if sentence:
                return verdict.fails("wrong-result", [f"{grid}: rank {number} {sentence}"])
    return verdict.passes("right on every rank of every grid")


def _load(script: Path) -> Any:
    """A student's file, with MPI's constants only; None without mpi4py."""
    try:
        mpi4py = importlib.import_module("mpi4py")
    except ImportError:
        return None
    mpi4py.rc.initialize = False
    return load(script)


def _no_mpi(name: str) -> Verdict:
    return Verdict(name).fails("no-mpi", ["this exercise needs mpi4py: pip install mpi4py mpich"])


def try_method(script: Path, module: str, name: str) -> Verdict:
    """Compare a method of a student's communicator with the right result, and with the bytes that it should count."""
    del module
    if (student := _load(script)) is None:
        return _no_mpi(name)
    operations = {operation: getattr(student.MPI, operation) for operation in ("SUM", "PROD", "MAX", "MIN")}
    student.MPI = SimpleNamespace(Request=Message, **operations)
    verdict = Verdict(f"{name}: 1 to {SIZES[-1]} ranks")
    trials = [(24, "SUM")] if name == "myAlltoall" else [*((elements, "SUM") for elements in ELEMENTS), (24, "MAX")]
    for size in SIZES:
        for elements, op in trials:
            world, where = SimulatedWorld(size), f"{size} rank{'s' * (size > 1)}, {elements} elements"
            where += ", MAX of int32" * (op == "MAX")
            wrong, halted = simulate(world, functools.partial(_call_method, student, name, elements, op))
            if halted is not None:
                return verdict.fails(halted[0], [f"{where}: {halted[1]}"])
            for number, (mistake, sentence) in enumerate(wrong):
                if mistake:
                    return verdict.fails(mistake, [f"{where}: rank {number} {sentence}"])
            for number, (counts, (_, counted)) in enumerate(zip(world.counts, wrong, strict=True)):
                moved = counts.sent_bytes + counts.received_bytes
                if int(counted) != moved:
                    told = f"rank {number} counts {int(counted):,} bytes, and has sent and received {moved:,}"
                    return verdict.fails("count", [f"{where}: {told}"])
            needed = {"ringAllreduce": 4 * (size - 1) * -(-elements // size) * (8 if op == "SUM" else 4)}
            most = max(counts.sent_bytes + counts.received_bytes for counts in world.counts)
            if name in needed and most > needed[name]:
                told = f"a rank sends and receives {most:,} bytes; around a ring, {needed[name]:,} are enough"
                return verdict.fails("slow", [f"{where}: {told}"])
    return verdict.passes("right on every rank, and the bytes that were moved are counted")


def _call_method(student: Any, name: str, elements: int, op: str, endpoint: SimulatedEndpoint) -> tuple[str, str]:
    """The mistake and what is wrong on a rank; or no mistake, and the bytes that it has counted."""
    rank, size = endpoint.get_rank(), endpoint.get_world_size()
    dtype, combine, what = (float, np.sum, "sum") if op == "SUM" else (np.int32, np.max, "maximum")
    given = [np.random.default_rng(r).integers(-9, 10, elements).astype(dtype) for r in range(size)]
    own, result = given[rank].copy(), np.full(elements, -77, dtype)  # which is no result
    world = student.Communicator(Communicator(endpoint))
    getattr(world, name)(own, result, *([getattr(student.MPI, op)] if op != "SUM" else []))  # by default, SUM
    if not np.array_equal(own, given[rank]):
        return "changed", "has another `src` than before"
    if name == "myAlltoall":
        expected = np.concatenate([np.split(array, size)[rank] for array in given])
        if not np.array_equal(result, expected):
            parts = zip(np.split(result, size), np.split(expected, size), strict=True)
            wrong = next(r for r, (part, right) in enumerate(parts) if not np.array_equal(part, right))
            return "wrong-result", f"has something else than rank {wrong}'s segment {rank} at segment {wrong}"
    elif not np.array_equal(result, combine(given, axis=0)):
        if op != "SUM" and np.array_equal(result, np.sum(given, axis=0)):
            return "ignores-op", f"has the sum of all ranks' arrays, and should have their {what}: `op` is MPI.{op}"
        if any(np.array_equal(result, array) for array in given):
            other = next(r for r in range(size) if np.array_equal(result, given[r]))
            return "wrong-result", f"has rank {other}'s array, and should have the {what} of all"
        return "wrong-result", f"has something else than the {what} of all ranks' arrays"
    return "", str(world.total_bytes_transferred)


def _call(student: Any, name: str, mp_size: int, dp_size: int, endpoint: SimulatedEndpoint) -> str:
    """What is wrong with what a rank gets; "" if nothing is."""
    rank, world = endpoint.get_rank(), Communicator(endpoint)
    model, copy = rank % mp_size, rank // mp_size
    if name == "get_info":
        return _wrong_info(student.get_info, world, rank, mp_size, dp_size)
    group = world.Split(color=copy, key=rank)
    whole, width = _whole(copy), WIDTH // mp_size
    own = slice(model * width, (model + 1) * width)
    if name in ("naive_collect_forward_input", "naive_collect_forward_output"):
        part = np.ascontiguousarray(whole[..., own])
        return _differs(getattr(student, name)(part, group, mp_size), whole, "all ranks' parts, in the order of ranks")
    if name == "naive_collect_backward_output":
        return _differs(student.naive_collect_backward_output(whole, model, mp_size), whole[..., own], "its own slice")
    terms = [whole * (other + 1) for other in range(mp_size)]
    expected = np.sum(terms, axis=0)[..., own]
    given = student.naive_collect_backward_x(terms[model], group, mp_size)
    return _differs(given, expected, "its own slice of the sum over the ranks")


def _whole(copy: int) -> Array:
    return np.random.default_rng(copy).integers(-9, 10, (BATCH, SEQ, WIDTH)).astype(float)


def _differs(given: object, expected: Array, what: str) -> str:
    if not isinstance(given, np.ndarray):
        return f"returned {type(given).__name__}, and should return {what}"
    if given.shape != expected.shape:
        return f"returned {given.shape}, and should return {what}: {expected.shape}"
    return "" if np.allclose(given, expected) else f"returned other numbers than {what}"


def _wrong_info(get_info: Callable[..., Any], world: Communicator, rank: int, mp_size: int, dp_size: int) -> str:
    for layer in ("fc_q", "fc_o"):
        given = get_info(world, rank, mp_size, dp_size, layer, 4 * RANKS, 8 * RANKS)
        if not isinstance(given, tuple) or len(given) != 6:
            return "returned something else than a tuple of six"
        mp_idx, dp_idx, mp_comm, dp_comm, in_dim, out_dim = given
        split = (4 * RANKS, 8 * RANKS // mp_size) if layer != "fc_o" else (4 * RANKS // mp_size, 8 * RANKS)
        copies = [r for r in range(RANKS) if r % mp_size == rank % mp_size]
        sharers = [r for r in range(RANKS) if r // mp_size == rank // mp_size]
        for what, got, right in (
            ("mp_idx", mp_idx, rank % mp_size),
            ("dp_idx", dp_idx, rank // mp_size),
            ("the ranks of mp_comm", mp_comm.ranks, sharers),
            ("the ranks of dp_comm", dp_comm.ranks, copies),
            (f"part_in_dim of {layer}", in_dim, split[0]),
            (f"part_out_dim of {layer}", out_dim, split[1]),
        ):
            if got != right:
                return f"gets {what} {got} instead of {right}"
    return ""
