"""The two parallel products equal the product of one process: any world, any shape, any dtype, exactly for integers."""

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.processes import LAB, free_port, process_group, run_group, run_ranks
from support.terminals import fork_launcher
from torch import Tensor

from distlab.comm.context import context_of
from distlab.comm.waits import TrafficError

sys.path.append(str(LAB))
from primer.dist import DTYPES, Matrix, par_matmul_by_reduction, par_matmul_by_row

SHAPES = [(7, 5, 3), (3, 16, 5), (1, 1, 1), (2, 1, 9), (1, 6, 1), (64, 33, 17), (0, 3, 2), (3, 0, 2), (3, 2, 0)]
PRODUCTS = [par_matmul_by_row, par_matmul_by_reduction]


def draw(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random numbers; integers from all of the dtype's range, so that their products wrap around."""
    if dtype.is_floating_point:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**62), 2**62, (rows, columns), generator=generator).to(dtype)


def pairs() -> Iterator[tuple[Tensor, Tensor]]:
    """Matrices that fit: every shape with every dtype, then some that do not lie in memory row after row."""
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for m, k, n in SHAPES:
            yield draw(m, k, dtype, generator), draw(k, n, dtype, generator)
    for dtype in (torch.float32, torch.int8):
        a, b = draw(10, 14, dtype, generator), draw(12, 10, dtype, generator)
        yield a.T, b.T
        yield a[::2, 1::3], b[:5, 3:].flip(1)
        yield a[:, :1], b.T[:1]
        yield a[:1].T, b.T[3:4, 2:3]
        yield a[:1, :1].expand(4, 6), b[:6]


def multiply_all(rank: int) -> list[tuple[Matrix, Tensor]]:
    """Both products of all pairs, as this rank has them."""
    results = []
    for a, b in pairs():
        given = (a, b) if rank == 0 else (None, None)
        before = a.clone(), b.clone()
        results.append((par_matmul_by_row(*given), par_matmul_by_reduction(*given)))
        assert torch.equal(a, before[0])
        assert torch.equal(b, before[1])
    return results


def assert_is_the_product(c: Matrix, a: Tensor, b: Tensor) -> None:
    assert c is not None
    assert (c.shape, c.dtype) == ((len(a), b.shape[1]), a.dtype)
    if not a.dtype.is_floating_point:
        assert torch.equal(c, a @ b)
        return
    a, b = a.double(), b.double()
    rounding = 4 * torch.finfo(c.dtype).eps * (a.abs() @ b.abs())
    assert ((c.double() - a @ b).abs() <= rounding).all()


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_equals_the_product_of_one_process(world_size: int) -> None:
    results = run_group(world_size, multiply_all)
    for index, (a, b) in enumerate(pairs()):
        by_row = [own[index][0] for own in results]
        assert_is_the_product(by_row[0], a, b)
        assert by_row[1:] == [None] * (world_size - 1)
        for own in results:
            assert_is_the_product(own[index][1], a, b)


def test_without_a_process_group_it_is_a_world_of_one() -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    for product in PRODUCTS:
        assert_is_the_product(product(a, b), a.detach(), b)


ZEROS = torch.zeros(3, 4)
MISFITS = [
    (ZEROS, torch.zeros(5, 6), r"A \(3, 4\) times B \(5, 6\): A needs as many columns as B has rows"),
    (torch.zeros(4), ZEROS, "must be matrices on rank 0"),
    (ZEROS, torch.zeros(2, 4, 3), "must be matrices on rank 0"),
    (None, ZEROS, "must be matrices on rank 0"),
    (ZEROS, torch.zeros(4, 3, dtype=torch.bool), "of one of the dtypes float16, "),
    (ZEROS, torch.zeros(4, 3, dtype=torch.float64), "the same dtype"),
]


def misfit_all(rank: int) -> Matrix:
    """Every rank gets the same error at once; the product that fits, afterwards, finds no message of theirs."""
    for a, b, sentence in MISFITS:
        for product in PRODUCTS:
            with pytest.raises(ValueError, match=sentence):
                product(*(a, b) if rank == 0 else (None, None))
    return par_matmul_by_reduction(*(ZEROS + 1, ZEROS.T + 1) if rank == 0 else (None, None))


@pytest.mark.parametrize("world_size", [1, 3])
def test_matrices_that_do_not_fit_are_an_error_on_all_ranks(world_size: int) -> None:
    for c in run_group(world_size, misfit_all):
        assert torch.equal(c, torch.full((3, 3), 4.0))


def count_bytes(rank: int) -> list[dict[str, int]]:
    counts, sent_bytes = [], context_of().ledger.sent_bytes
    for product in PRODUCTS:
        sent_bytes.clear()
        product(*(torch.ones(6, 12), torch.ones(12, 3)) if rank == 0 else (None, None))
        counts.append({kind: sent for kind, sent in sent_bytes.items() if sent})
    return counts


def test_what_each_rank_sends() -> None:
    first, *others = run_group(3, count_bytes)
    a, b, c, shapes = 4 * 6 * 12, 4 * 12 * 3, 4 * 6 * 3, 64
    by_row = {"shapes": shapes, "A": a * 2 // 3, "B": b}
    by_reduction = {"shapes": shapes, "A": a * 2 // 3, "B": b * 2 // 3, "C": 2 * c * 2 // 3}
    assert first == [by_row, by_reduction]
    assert others == [[{"C": c // 3}, {"C": 2 * c * 2 // 3}]] * 2


def wait_for_an_absent_rank(rank: int, port: int) -> str:
    """Rank 1 meets the others and then takes no part."""
    try:
        with process_group(rank, 2, port) as context:
            context.waits.timeout_seconds = 0.3
            if rank == 1:
                time.sleep(1)
                raise TrafficError("absent", RuntimeError())
            par_matmul_by_row(ZEROS, ZEROS.T)
    except TrafficError as error:
        return str(error)
    return "did not wait"


def test_a_rank_that_takes_no_part_ends_the_wait_at_the_deadline() -> None:
    waited, _ = run_ranks(2, wait_for_an_absent_rank, free_port(), deadline=20)
    assert re.match(r"rank 0 waited 0\.\d s for the shapes of A and B", waited), waited


def test_the_script_times_checks_and_counts(tmp_path: Path) -> None:
    flags = "--world-size 2 --rounds 1 --shapes 8x8x8,70x3x5".split()
    ended = fork_launcher("dist", *flags, "--out", tmp_path).finish()
    assert ended.status == 0, ended.err
    assert all(line.startswith("#") for line in ended.out.splitlines())
    row = re.compile(r"# (\S+) +[\d.]+ ms +[\d.]+ ms +([\d.]+ k?B) +[\d.]+ ms +([\d.]+ k?B)")
    table = [match.groups() for match in map(row.fullmatch, ended.out.splitlines()) if match]
    # 64 bytes of shapes and: half of A, B, half of C; half of A and of B (one of three columns and rows), C twice.
    assert table == [("8x8x8", "576 B", "832 B"), ("70x3x5", "1.24 kB", "3.16 kB")]
