"""Tries functions that work on several ranks: products of matrices, and exchanges that must not deadlock."""

import torch
from torch import Tensor

from distlab.comm.context import context_of
from distlab.comm.pending import Pending
from distlab_exercises.collectives import whose
from distlab_exercises.loading import Solution
from distlab_exercises.verdict import Wrong, expect

RANKS = 3
SENT_BYTES = {"both_send": (4000, 8000, 4000), "order": (8000, 16_000, 8000), "skipped": (15_999, 15_999, 19_999)}
SHAPES = [(6, 9, 5), (7, 4, 3), (2, 5, 4), (5, 2, 4)]  # m, k, n; rows or columns do not always divide among the ranks


def try_product(solution: Solution) -> list[str]:
    """Multiply matrices of rank 0's with a student's function."""
    rank, run = solution.rank, solution.join(RANKS, solution.module.DEFAULTS)
    results = []
    for m, k, n in SHAPES:
        generator = torch.Generator().manual_seed(m + k + n)  # small integers, whose products are exact
        A, B = (torch.randint(-4, 5, size, generator=generator).float() for size in ((m, k), (k, n)))
        before = _sent_bytes()
        product = solution.function(*((A, B) if rank == 0 else (None, None)))
        results.append((A, B, product, _sent_bytes() - before))
    run.close()
    by_row = solution.name == "par_matmul_by_row"
    for A, B, product, sent in results:
        who = f"A {tuple(A.shape)} times B {tuple(B.shape)}: rank {rank}"
        if rank == 0 or not by_row:  # else its result does not matter: rank 0 has the product
            _check_product(by_row, product, A, B, who)
        _check_share(by_row, rank, sent, A, B, who)
    return ["the product of one process, for matrices whose rows and columns divide among the ranks or not"]


def _sent_bytes() -> int:
    """Return the bytes sent so far."""
    return sum(context_of().ledger.sent_bytes.values())


def _check_share(by_row: bool, rank: int, sent: int, A: Tensor, B: Tensor, who: str) -> None:
    """Check that a rank sends at least its share of the product; it would not if rank 0 computed it alone."""
    (m, k), n = A.shape, B.shape[1]
    pieces = [len(piece) for piece in torch.arange(m if by_row else k).tensor_split(RANKS)]
    needed = 4 * n * (pieces[rank] if by_row else m * (pieces[rank] > 0))
    share = "its rows of the product" if by_row else "its product, a term of the sum,"
    told = f"{who} sends {sent} bytes, and {share} has {needed}: each rank computes a share"
    expect(rank == 0 or sent >= needed, "no-share", told)


def _check_product(by_row: bool, own: Tensor | None, A: Tensor, B: Tensor, who: str) -> None:
    right = A @ B
    if not isinstance(own, Tensor):
        raise Wrong("no-product", f"{who} returned no matrix")
    told = f"{who} returned {tuple(own.shape)}, and the product is {tuple(right.shape)}"
    expect(own.shape == right.shape, "shape", told)
    if torch.equal(own, right):
        return
    if by_row:
        first = next(index for index in range(len(right)) if not torch.equal(own[index], right[index]))
        owner = next(r for r, part in enumerate(torch.arange(len(right)).tensor_split(RANKS)) if first in part)
        raise Wrong("wrong-rows", f"{who} has other rows from row {first} on, which rank {owner} computes")
    terms = [a @ b for a, b in zip(A.tensor_split(RANKS, 1), B.tensor_split(RANKS, 0), strict=True)]
    raise Wrong("wrong-product", f"{who} {whose(own, terms, 'product')}, and should have the sum of all")


def try_case(solution: Solution) -> list[str]:
    """Run one case of the chapter on deadlocks with the student's cure."""
    name, rank, module = solution.name, solution.rank, solution.module
    run = solution.join(RANKS, module.DEFAULTS, case=name.replace("_", "-"), cure=True, timeout=60)
    contents: set[float] = set()  # numbers in what is sent

    def keep_what_is_sent(pending: Pending) -> None:
        for tensor in pending.result() if pending.name.way == "send" else []:
            if tensor.numel() > 1:  # no mere sign to the other rank
                contents.update(tensor.unique().tolist())

    context_of().observers.append(keep_what_is_sent)
    module.try_case(run)
    sent, needed = _sent_bytes(), SENT_BYTES[name][rank]
    run.close()
    told = f"rank {rank} sends {sent:,} bytes instead of {needed:,}"
    expect(sent >= needed, "left-out", f"{told}: a cure must not leave out what is to be exchanged")
    if name == "both_send" and (others := contents - {rank}):
        told = f"rank {rank} sends a tensor of {others.pop():g}, such as it has received, instead of {rank}, its own"
        raise Wrong("not-its-own", f"{told}: neighbors exchange their own tensors")
    return ["all ranks finish, and exchange all that they should"]
