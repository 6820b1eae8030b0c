"""One matrix product on several ranks: split along the rows, or along the dimension of the sum.

    python primer/dist.py <rank>                in three terminals, with the ranks 0, 1 and 2
    ./launch.sh dist --world-size 2 --shapes 1024x1024x1024,1024x64x1024

Rank 0 has A (m, k) and B (k, n) and needs C = A B (m, n). By row: each row of C is a row of A times B, so a rank needs
all of B to compute some rows of C. By reduction: C is a sum over k; a rank gets some columns of A and the same rows of
B, and its product is a matrix of full size that has to be added to those of the other ranks. The table shows the
milliseconds of both, and of rank 0 alone with as many threads, and the bytes that all ranks sent. (Exercise 2 of "Data
parallelism from scratch", Jinyang Li, pathway2ai.)
"""

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from distlab.comm.context import context_of
from distlab.comm.group import device_of
from distlab.comm.names import named
from distlab.run.logs import human_bytes
from distlab.run.main import main
from distlab.run.run import Run
from distlab.run.terminal import say
from distlab.settings.common import RunSettings, WorldSize, require_positive
from simplellm.errors import InputError, require

Matrix = Tensor | None  # None where only rank 0 has it
Product = Callable[[Matrix, Matrix], Matrix]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.uint8, torch.int8, torch.int32, torch.int64]
MOST_NUMBERS = 2**30  # in a matrix; more are taken for a typing error


@dataclass
class MatmulSettings(WorldSize, RunSettings):
    """The exercise's command line."""

    world_size: int = 3
    """ranks that share the product"""
    shapes: Annotated[str, tyro.conf.arg(metavar="MxKxN,...")] = (
        "256x256x256,1024x1024x1024,2048x2048x2048,4096x256x256,256x8192x256"
    )
    """products to time: A has M rows and K columns, B has K rows and N columns"""
    rounds: int = 5
    """number of timings of each product, of which the median is printed"""

    def check(self) -> None:
        super().check()
        require_positive(self, "rounds")
        for shape in self.shapes.split(","):
            if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", shape):
                raise InputError(f"--shapes {shape}: give rows of A, columns of A and columns of B, like 512x256x128")
            m, k, n = map(float, shape.split("x"))  # not `int`, which refuses thousands of digits
            fits = max(m * k, k * n, m * n) <= MOST_NUMBERS
            require(fits, f"--shapes {shape}: give matrices of at most {MOST_NUMBERS:,} numbers each")


DEFAULTS = MatmulSettings()


@torch.no_grad()
def par_matmul_by_row(A: Matrix, B: Matrix) -> Matrix:
    """Return the product of rank 0's matrices; each rank computes some of its rows. No gradients.

    Args:
        A: (m, k) on rank 0; ignored on other ranks.
        B: (k, n) on rank 0, of the same dtype and device.

    Returns:
        C (m, n) on rank 0, None elsewhere.

    Raises:
        ValueError: the matrices do not fit. All ranks raise it.
    """
    A, B = agree_on_shapes(A, B)
    rows_of_A = scatter(A, 0, "A")
    B = B.contiguous()  # to send from, or to receive into
    with named("B", "B"):
        dist.broadcast(B, 0)
    return gather_rows(rows_of_A @ B, len(A), "C")


@torch.no_grad()
def par_matmul_by_reduction(A: Matrix, B: Matrix) -> Tensor:
    """Return the product of rank 0's matrices as a sum of products, one per rank. No gradients.

    Args:
        A: (m, k) on rank 0; ignored on other ranks.
        B: (k, n) on rank 0, of the same dtype and device.

    Returns:
        C (m, n), on every rank.

    Raises:
        ValueError: the matrices do not fit. All ranks raise it.
    """
    A, B = agree_on_shapes(A, B)
    C = scatter(A, 1, "A") @ scatter(B, 0, "B")  # one term of the sum
    with named("C", "C"):
        dist.all_reduce(C)
    return C


def agree_on_shapes(A: Matrix, B: Matrix) -> tuple[Tensor, Tensor]:
    """Return rank 0's matrices; on other ranks, placeholders of equal shape, dtype and kind of device, without memory.

    All ranks make the same check on the same values, so either all of them raise or none does, and no rank waits.
    """
    is_first = dist.get_rank() == 0
    facts = torch.tensor([facts_of(A), facts_of(B)] if is_first else [[0] * 4] * 2, device=device_of())
    with named("the shapes of A and B", "shapes"):
        dist.broadcast(facts, 0)
    (m, k, *kind_of_A), (k_of_B, n, *kind_of_B) = facts.tolist()
    if min(m, n) < 0:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"A and B must be matrices on rank 0, of one of the dtypes {names}")
    if k != k_of_B:
        raise ValueError(f"A ({m}, {k}) times B ({k_of_B}, {n}): A needs as many columns as B has rows")
    if kind_of_A != kind_of_B:
        raise ValueError("A and B must have the same dtype and be on the same device")
    if is_first:
        assert A is not None
        assert B is not None
        return A, B
    dtype, on_gpu = kind_of_A
    nothing = torch.zeros((2,), dtype=DTYPES[dtype], device="cuda" if on_gpu else "cpu")
    return nothing[0].expand(m, k), nothing[1].expand(k, n)


def facts_of(matrix: Matrix) -> list[int]:
    """Return the facts for other ranks: a matrix's rows, columns, dtype, whether on a GPU; four -1 if invalid."""
    if not isinstance(matrix, Tensor) or matrix.ndim != 2 or matrix.dtype not in DTYPES:
        return [-1] * 4
    return [*matrix.shape, DTYPES.index(matrix.dtype), int(not matrix.is_cpu)]


def scatter(matrix: Tensor, dim: int, name: str) -> Tensor:
    """Return this rank's piece of rank 0's matrix, split along `dim` into nearly equal pieces, one per rank."""
    rank, pieces = dist.get_rank(), matrix.tensor_split(dist.get_world_size(), dim)
    with named(f"a piece of {name}", name):
        if rank > 0:
            piece = pieces[rank].contiguous()  # memory to receive into
            dist.recv(piece, 0)
            return piece
        sends: list[Any] = [dist.isend(pieces[to].contiguous(), to) for to in range(1, len(pieces))]
    for send in sends:
        send.wait()
    return pieces[0]


def gather_rows(rows: Tensor, count: int, name: str) -> Matrix:
    """Return, on rank 0, the matrix of `count` rows from the ranks' pieces, split as in `scatter`; None elsewhere."""
    with named(f"rows of {name}", name):
        if dist.get_rank() > 0:
            dist.send(rows, 0)
            return None
        matrix = rows.new_empty(count, rows.shape[1])
        first, *others = matrix.tensor_split(dist.get_world_size())
        arriving: list[Any] = [dist.irecv(piece, source) for source, piece in enumerate(others, start=1)]
    first.copy_(rows)
    for piece in arriving:
        piece.wait()
    return matrix


def matmul_alone(A: Matrix, B: Matrix) -> Matrix:
    """Return C, computed by rank 0 alone; None on other ranks."""
    return None if A is None or B is None else A @ B


def compare(run: Run[MatmulSettings]) -> None:
    if run.rank == 0:
        say(f"{'m x k x n':<18}{'alone':>12}{'by row':>12} {'sent':>8}{'by reduction':>15} {'sent':>8}")
    for shape in run.settings.shapes.split(","):
        m, k, n = map(int, shape.split("x"))
        A = B = None
        if run.rank == 0:
            A, B = torch.randn(m, k, device=run.device), torch.randn(k, n, device=run.device)
        expected, alone_ms, _ = measure(run, matmul_alone, A, B)
        by_row, by_row_ms, by_row_bytes = measure(run, par_matmul_by_row, A, B)
        by_reduction, by_reduction_ms, by_reduction_bytes = measure(run, par_matmul_by_reduction, A, B)
        if expected is None or by_row is None or by_reduction is None:
            continue
        for C in by_row, by_reduction:
            assert torch.dist(C, expected) <= 1e-5 * expected.norm(), f"{shape}: another product than one process's"
        say(
            f"{shape:<18}{alone_ms:>9.1f} ms{by_row_ms:>9.1f} ms {human_bytes(by_row_bytes):>8}"
            f"{by_reduction_ms:>12.1f} ms {human_bytes(by_reduction_bytes):>8}"
        )


def measure(run: Run[MatmulSettings], product: Product, A: Matrix, B: Matrix) -> tuple[Matrix, float, int]:
    """Return the result of `product`, its median milliseconds on this rank, and the bytes sent by all ranks."""
    sent_bytes = context_of().ledger.sent_bytes
    sent_before = sent_bytes.total()
    milliseconds = []
    for _ in range(1 + run.settings.rounds):
        started = time.perf_counter()
        C = product(A, B)
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        milliseconds.append(1000 * (time.perf_counter() - started))
    sent = torch.tensor((sent_bytes.total() - sent_before) // len(milliseconds), device=run.device)
    with named("the bytes sent", "control"):
        dist.all_reduce(sent)
    return C, statistics.median(milliseconds[1:]), int(sent)  # the first one warms up


if __name__ == "__main__":
    main(compare, DEFAULTS, __doc__)
