"""Run under mpirun by test_mpi_chapter.py: checks the lab's Communicator against NumPy, and prints the bytes it counts.

No result is compared with MPI's: every rank knows what all ranks have, and computes the result alone.
"""

import functools
import itertools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "mpi"))
from mpi_wrapper import Communicator

comm = Communicator(MPI.COMM_WORLD)
RANK, SIZE = comm.Get_rank(), comm.Get_size()
OPS = [
    (MPI.SUM, np.add),
    (MPI.PROD, np.multiply),
    (MPI.MAX, np.maximum),
    (MPI.MIN, np.minimum),
]
ORDERS: list[Callable[[Any], Any]] = [
    np.ascontiguousarray,
    np.asfortranarray,
    lambda array: np.repeat(array, 2, axis=-1)[..., ::2],  # with gaps
]


def rows(shape: tuple[int, ...], dtype: Any) -> list[Any]:
    """What all ranks have: small integers, so that real numbers are combined without rounding."""
    return [np.random.default_rng([rank, *shape]).integers(-3, 4, shape).astype(dtype) for rank in range(SIZE)]


def same(got: Any, expected: Any, what: object) -> None:
    np.testing.assert_array_equal(got, expected, err_msg=str(what), strict=True)


def check(name: str, shape: tuple[int, ...], dtype: Any, expected: Callable[[list[Any]], Any], *op: MPI.Op) -> None:
    """Call a method with inputs and results in every order of memory, and with one array for both."""
    everything = rows(shape, dtype)
    want = expected(everything)
    for src_order, dst_order in itertools.product(ORDERS, ORDERS):
        src, dst = src_order(everything[RANK]), dst_order(np.full(want.shape, 99, dtype))
        getattr(comm, name)(src, dst, *op)
        same(dst, want, (name, shape, dtype, op))
        same(src, everything[RANK], f"{name} changed its input")
    if want.shape == shape:
        array = everything[RANK].copy()
        getattr(comm, name)(array, array, *op)
        same(array, want, f"{name} in place")


def refused(sentence: str, call: Callable[[], object]) -> None:
    """Every rank must raise; the barrier holds this rank's end back if another one waits inside the call."""
    before = comm.total_bytes_transferred
    with pytest.raises(ValueError, match=sentence):
        call()
    assert comm.total_bytes_transferred == before
    assert not comm.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    comm.Barrier()
    assert not comm.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG), "something was sent"


def check_all() -> None:
    for dtype in (np.int32, np.float64):
        for shape in ((1,), (2, 3), (7, SIZE)):  # one element: fewer than ranks
            for op, function in OPS:
                for name in ("Allreduce", "myAllreduce", "ringAllreduce"):
                    check(name, shape, dtype, functools.partial(functools.reduce, function), op)
        for name in ("Alltoall", "myAlltoall"):
            check(name, (SIZE, 2, 3), dtype, lambda all_rows: np.stack([row[RANK] for row in all_rows]))
        check("Allgather", (2, 3), dtype, np.stack)
        check("Reduce_scatter", (SIZE, 2, 3), dtype, lambda all_rows: sum(all_rows)[RANK])
    for name in ("Allreduce", "myAllreduce", "ringAllreduce", "Alltoall", "myAlltoall"):
        check(name, (0,), np.float32, lambda all_rows: all_rows[0])

    for name in ("myAllreduce", "ringAllreduce"):
        method, array = getattr(comm, name), np.ones(4, np.int32)
        refused("combine with SUM, PROD, MAX or MIN", functools.partial(method, array, array.copy(), MPI.BAND))
    ops: list[MPI.Op]
    for name, ops in (
        ("Allreduce", [MPI.SUM]),
        ("myAllreduce", []),
        ("ringAllreduce", []),
        ("Alltoall", []),
        ("myAlltoall", []),
        ("Allgather", []),
        ("Reduce_scatter", []),
    ):
        method, array = getattr(comm, name), np.ones(SIZE, np.int32)
        refused("dst has 77 elements", functools.partial(method, array, np.ones(77, np.int32), *ops))
        size = {"Allgather": SIZE * SIZE, "Reduce_scatter": 1}.get(name, SIZE)
        refused("of float32", functools.partial(method, array, np.ones(size, np.float32)))
    if SIZE > 1:
        for name in ("Alltoall", "myAlltoall", "Reduce_scatter"):
            method, array = getattr(comm, name), np.ones(SIZE + 1, np.int32)
            refused(f"do not divide among {SIZE} ranks", functools.partial(method, array, array.copy()))

    for half in (comm.Split(key=-RANK, color=RANK % 2), comm.Split(-RANK, RANK % 2)):
        assert isinstance(half, Communicator)
        assert half.total_bytes_transferred == 0
        members = [rank for rank in range(SIZE) if rank % 2 == RANK % 2]
        assert half.Get_size() == len(members)
        assert half.Get_rank() == members[::-1].index(RANK)
        total = np.full(1, -77)
        half.myAllreduce(np.array([RANK]), total)
        assert total[0] == sum(members)


def check_stray_messages() -> None:
    """A message of the caller's own, under way between the same ranks, is not taken for one of the lab's."""
    pending = comm.comm.Isend(np.full(3, 5), (RANK + 1) % SIZE, 0)
    src = np.arange(SIZE)
    for method in (comm.myAllreduce, comm.ringAllreduce, comm.myAlltoall):
        dst = np.full(SIZE, -77)
        method(src, dst)
        same(dst, np.full(SIZE, RANK) if method == comm.myAlltoall else src * SIZE, method)
    received = np.empty(3, int)
    comm.comm.Recv(received, (RANK - 1) % SIZE, 0)
    pending.Wait()
    same(received, np.full(3, 5), "the caller's own")


def counted(name: str, src_size: int, dst_size: int) -> list[int]:
    """The bytes that each rank counts for one call with float32."""
    before = comm.total_bytes_transferred
    getattr(comm, name)(np.ones(src_size, np.float32), np.ones(dst_size, np.float32))
    return comm.comm.allgather(comm.total_bytes_transferred - before)


try:
    check_all()
    check_stray_messages()
    ELEMENTS = 6 * SIZE  # divides among the ranks
    table = {
        name: counted(name, ELEMENTS, {"Allgather": ELEMENTS * SIZE, "Reduce_scatter": 6}.get(name, ELEMENTS))
        for name in (
            "Allreduce",
            "Allgather",
            "Reduce_scatter",
            "Alltoall",
            "myAllreduce",
            "ringAllreduce",
            "myAlltoall",
        )
    }
    table["ringAllreduce of 7"] = counted("ringAllreduce", 7, 7)
    if RANK == 0:
        print(json.dumps(table))
except BaseException:
    traceback.print_exc()
    MPI.COMM_WORLD.Abort(1)
