"""Collective operations over MPI: the inputs and results of each rank, and two handwritten ones beside MPI's own.

    cd mpi; mpirun -n 8 python mpi-test.py                          every case in turn
    mpirun -n 8 python mpi-test.py --test_case allreduce            one of them
    ./launch.sh mpi --world-size 4 --test_case myallreduce          the same with another number of ranks

The exit status is 0 only if every result is right. Lines that hold no results begin with "#".
"""

import contextlib
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import tyro
from mpi4py import MPI
from mpi_wrapper import Communicator
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from simplellm.errors import InputError
from simplellm.usage_errors import one_sentence

Array = NDArray[Any]

RANDOM_RUNS = 100
TIMED_RUNS = 20  # at each of the two sizes
LARGE = 1_000_000  # elements


def allreduce(comm: Communicator, _: int) -> bool:
    """allreduce: all ranks get the sum of what they had"""
    had, got = example(comm, 4), poisoned(4)
    comm.Allreduce(had, got)
    return show(comm, had, got, lambda rows: [np.sum(rows, axis=0)] * len(rows))


def allgather(comm: Communicator, _: int) -> bool:
    """allgather: all ranks get everything, in rank order"""
    had, got = example(comm, 2), poisoned(2 * comm.Get_size())
    comm.Allgather(had, got)
    return show(comm, had, got, lambda rows: [np.concatenate(rows)] * len(rows))


def reduce_scatter(comm: Communicator, _: int) -> bool:
    """reduce_scatter: rank r gets the r-th block of the sum"""
    had, got = example(comm, comm.Get_size()), poisoned(1)
    comm.Reduce_scatter(had, got)
    return show(comm, had, got, lambda rows: list(np.sum(rows, axis=0).reshape(-1, 1)))


def split(comm: Communicator, _: int) -> bool:
    """split: pairs of neighbors form groups, and each group computes its own sum"""
    had, got = example(comm, 4), poisoned(4)
    pair = comm.Split(key=comm.Get_rank(), color=comm.Get_rank() // 2)
    pair.Allreduce(had, got)
    comm.total_bytes_transferred += pair.total_bytes_transferred
    return show(comm, had, got, lambda rows: [np.sum(rows[r // 2 * 2 :][:2], axis=0) for r in range(len(rows))])


def alltoall(comm: Communicator, _: int) -> bool:
    """alltoall: rank r gets the r-th element of every rank"""
    had, got = example(comm, comm.Get_size()), poisoned(comm.Get_size())
    comm.Alltoall(had, got)
    return show(comm, had, got, lambda rows: list(np.transpose(rows)))


def myallreduce(comm: Communicator, seed: int) -> bool:
    """myallreduce: two handwritten all-reduces, through rank 0 and around a ring, beside MPI's own"""

    def draw(shared: Generator, own: Generator) -> list[Any]:
        src = values(own, one_of(DTYPES, shared), random_size(shared))
        return [src, one_of(OPS, shared)]

    return compare(comm, seed, comm.Allreduce, [comm.myAllreduce, comm.ringAllreduce], draw)


def myalltoall(comm: Communicator, seed: int) -> bool:
    """myalltoall: a handwritten all-to-all, whose messages are all in transit at once, beside MPI's own"""

    def draw(shared: Generator, own: Generator) -> list[Any]:
        segment = 1 + random_size(shared) // comm.Get_size()
        return [values(own, one_of(DTYPES, shared), segment * comm.Get_size())]

    return compare(comm, seed, comm.Alltoall, [comm.myAlltoall], draw)


CASES = {
    case.__name__: case for case in (allreduce, allgather, reduce_scatter, split, alltoall, myallreduce, myalltoall)
}
OPS = (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN)
DTYPES = (np.int32, np.int64, np.float32, np.float64)


def example(comm: Communicator, size: int) -> Array:
    """(size,) numbers that show which rank they come from: 30, 31, 32, ... on rank 3."""
    return 10 * comm.Get_rank() + np.arange(size)


def poisoned(size: int, dtype: Any = int, poison: int = -77) -> Array:
    """(size,) array for a result, filled with a value that no result has, so that a missing result is noticed."""
    return np.full(size, poison, dtype)


def show(comm: Communicator, had: Array, got: Array, expected: Callable[[list[Array]], list[Array]]) -> bool:
    """Print the input and result of every rank, in rank order; true on every rank if NumPy computes the same."""
    all_had, all_got = comm.comm.allgather(had), comm.comm.allgather(got)
    all_right = True
    for rank, (had, got, right) in enumerate(zip(all_had, all_got, expected(all_had), strict=True)):
        wrong = not np.array_equal(got, right)
        all_right = all_right and not wrong
        say(comm, f"rank {rank} had {had} and got {got}" + f", which is WRONG: it should be {right}" * wrong)
    return all_right


def values(own: Generator, dtype: Any, size: int) -> Array:
    """(size,) random numbers of this rank. Real ones are positive, so that sums do not lose digits by cancellation."""
    if np.issubdtype(dtype, np.integer):
        return own.integers(-9, 10, size, dtype)
    return own.uniform(0.5, 1.5, size).astype(dtype)


def one_of(choices: tuple[Any, ...], shared: Generator) -> Any:
    """A random one of the choices."""
    return choices[shared.integers(len(choices))]


def random_size(shared: Generator) -> int:
    """1 to 100,000 elements; each power of ten is equally likely."""
    return int(10 ** shared.uniform(0, 5))


def compare(
    comm: Communicator,
    seed: int,
    of_mpi: Callable[..., None],
    by_hand: list[Callable[..., None]],
    draw: Callable[[Generator, Generator], list[Any]],
) -> bool:
    """Print how often handwritten operations agree with MPI's own, and the median time of a call of each.

    Args:
        comm: communicator of the ranks.
        seed: seed of the random inputs.
        of_mpi: MPI's operation, called as `of_mpi(src, dst, *op)`, like the handwritten ones.
        by_hand: handwritten operations to compare with it.
        draw: returns `[src, *op]` from two generators: one that is the same on all ranks, and this rank's own.

    Returns:
        True on every rank if all results agree on all ranks.
    """
    shared, own = default_rng(seed), default_rng([seed, comm.Get_rank()])
    small, large = (values(own, np.float32, per_rank * comm.Get_size()) for per_rank in (1, LARGE // comm.Get_size()))
    columns = {
        f"{RANDOM_RUNS} random runs": [draw(shared, own) for _ in range(RANDOM_RUNS)],
        f"{small.nbytes:,} bytes": [[small]] * TIMED_RUNS,
        f"{large.nbytes:,} bytes": [[large]] * TIMED_RUNS,
    }
    table = [["#", *columns], *([method.__name__] for method in (of_mpi, *by_hand))]
    all_right = True
    for runs in columns.values():
        right = np.ones((1 + len(by_hand), len(runs)), int)
        seconds = np.empty(right.shape)
        for run, (src, *op) in enumerate(runs):
            expected = poisoned(src.size, src.dtype, -78)
            seconds[0, run] = timed(comm, of_mpi, src, expected, *op)
            for row, method in enumerate(by_hand, 1):
                got = poisoned(src.size, src.dtype)
                seconds[row, run] = timed(comm, method, src, got, *op)
                right[row, run] = agree(got, expected)
        comm.comm.Allreduce(MPI.IN_PLACE, right, MPI.MIN)
        comm.comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)  # a call takes as long as on the slowest rank
        all_right = all_right and bool(right.all())
        for row, line in enumerate(table[1:]):
            verdict = f"{right[row].sum()} of {len(runs)} right, " if row else ""
            line.append(f"{verdict}{1000 * np.median(seconds[row]):.3f} ms")
    for name, *cells in table:
        say(comm, f"{name:<14}" + "".join(f"{cell:>30}" for cell in cells))
    return all_right


def timed(comm: Communicator, collective: Callable[..., None], *args: Any) -> float:
    """Seconds that a call takes on this rank, after a barrier."""
    comm.Barrier()
    started = MPI.Wtime()
    collective(*args)
    return MPI.Wtime() - started


def agree(got: Array, expected: Array) -> bool:
    """Return whether two results agree: integers must be equal; real numbers may differ by rounding."""
    if np.issubdtype(got.dtype, np.integer):
        return np.array_equal(got, expected)
    return np.allclose(got, expected, rtol=100 * np.finfo(got.dtype).eps, atol=0)


def say(comm: Communicator, text: str) -> None:
    """Print on rank 0 only; lines of several ranks would appear in any order."""
    if comm.Get_rank() == 0:
        print(text, flush=True)


@dataclass
class Request:
    """The command line."""

    test_case: Annotated[str, tyro.conf.arg(metavar="|".join(["all", *CASES]))] = "all"
    """operation to run; all: each in turn"""
    seed: int = 0
    """seed of the random runs"""


def read_command_line(rank: int) -> Request:
    """Read the command line; with `--help`, only rank 0 prints.

    Raises:
        InputError: a flag or value cannot work; the message is one sentence.
    """
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            request = tyro.cli(Request, prog="mpi-test.py", description=__doc__, console_outputs=rank == 0)
    except SystemExit as end:
        if end.code in (0, None):  # --help
            raise
        raise InputError(one_sentence(errors.getvalue())) from None
    if request.test_case not in ("all", *CASES):
        raise InputError(f"--test_case {request.test_case}: give one of all, {', '.join(CASES)}")
    if request.seed < 0:
        raise InputError(f"--seed {request.seed}: give 0 or more")
    return request


def main() -> int:
    """Run what the command line asks for, and return the exit status, which is the same on all ranks."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would not run while this rank waits in MPI
    comm = Communicator(MPI.COMM_WORLD)
    try:
        request = read_command_line(comm.Get_rank())
    except InputError as error:
        if comm.Get_rank() == 0:
            print(f"# {error}", file=sys.stderr)
        return 2
    all_right = True
    for name, case in CASES.items():
        if request.test_case in ("all", name):
            say(comm, f"# {case.__doc__}")
            comm.total_bytes_transferred = 0
            all_right = case(comm, request.seed) and all_right
            say(comm, f"# bytes counted on rank 0: {comm.total_bytes_transferred:,}")
    return 0 if all_right else 1


if __name__ == "__main__":
    try:
        status = main()
    except Exception as error:
        traceback.print_exc()
        print(
            f"# rank {MPI.COMM_WORLD.Get_rank()} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True
        )
        os.close(sys.stderr.fileno())  # or MPI's own message would follow this one
        time.sleep(0.5)  # when a rank aborts, mpirun drops output that it has not passed on yet
        MPI.COMM_WORLD.Abort(1)  # the other ranks may be waiting for this one
    sys.exit(status)
