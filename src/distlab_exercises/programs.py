"""Tries functions that work on several ranks over gloo: products of matrices, and exchanges that must not deadlock."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.comm.context import context_of
from distlab.comm.pending import Pending
from distlab.run.run import Run
from distlab.run.settings import RunSettings
from distlab_exercises.loading import load, settings_for, settings_of_world
from distlab_exercises.ranks import Facts, Submission, trouble
from distlab_exercises.shares import fit
from distlab_exercises.verdict import Verdict, Wrong

RANKS = 3
SENT_BYTES = {"both_send": (4000, 8000, 4000), "order": (8000, 16_000, 8000), "skipped": (15_999, 15_999, 19_999)}
SHAPES = [(6, 9, 5), (7, 4, 3), (2, 5, 4), (5, 2, 4)]  # m, k, n; rows or columns do not always divide among the ranks


def try_product(name: str, submission: Submission) -> Verdict:
    """Multiply matrices of rank 0's with a student's function on three ranks."""
    verdict = Verdict(f"{name}: {RANKS} ranks")
    reports = submission.run_ranks(RANKS, _multiply, name, settings_of_world(RANKS, submission.folder / name))
    if found := trouble(reports):
        return verdict.fails(*found, printed=reports)
    for number, shape in enumerate(SHAPES):
        A, B = _matrices(shape)
        for report in reports:
            product, sent = report.facts["products"][number], report.facts["sent"][number]
            wrong = _name_product(name, report.rank, product, A, B) or _name_share(name, report.rank, sent, shape)
            if wrong is not None:
                given = "A ({0}, {1}) times B ({1}, {2})".format(*shape)
                return verdict.fails(wrong[0], [f"{given}: rank {report.rank} {wrong[1]}"], printed=reports)
    return verdict.passes(
        "the product of one process, for matrices whose rows and columns divide among the ranks or not"
    )


def _matrices(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Small integers, whose products are exact."""
    generator = torch.Generator().manual_seed(sum(shape))
    m, k, n = shape
    return tuple(torch.randint(-4, 5, size, generator=generator).float() for size in ((m, k), (k, n)))  # type: ignore[return-value]


def _multiply(rank: int, script: Path, name: str, values: dict[str, Any]) -> Facts:
    module = load(script)
    run: Run[Any] = Run(settings_for(rank, module.DEFAULTS, RunSettings, values), script)
    products, sent = [], []
    for shape in SHAPES:
        A, B = _matrices(shape) if rank == 0 else (None, None)
        before = _sent_bytes()
        product = getattr(module, name)(A, B)
        sent.append(_sent_bytes() - before)
        products.append(product.tolist() if isinstance(product, Tensor) else None)
    run.close()
    return {"products": products, "sent": sent}


def _sent_bytes() -> int:
    """Of matrices, so far."""
    return sum(count for kind, count in context_of().ledger.sent_bytes.items() if kind not in ("control", "shapes"))


def _name_share(name: str, rank: int, sent: int, shape: tuple[int, int, int]) -> Wrong:
    """Whether a rank sends less than its share of the product, as where rank 0 computes it alone."""
    m, k, n = shape
    by_row = name == "par_matmul_by_row"
    pieces = [len(piece) for piece in torch.arange(m if by_row else k).tensor_split(RANKS)]
    needed = 4 * n * (pieces[rank] if by_row else m * (pieces[rank] > 0))
    if rank == 0 or sent >= needed:
        return None
    share = "its rows of the product" if by_row else "its product, a term of the sum,"
    return "no-share", f"sends {sent} bytes, and {share} has {needed}: each rank computes a share"


def _name_product(name: str, rank: int, product: list[list[float]] | None, A: Tensor, B: Tensor) -> Wrong:
    right = A @ B
    if rank > 0 and name == "par_matmul_by_row":
        return None  # whatever it returns: rank 0 has the product
    if product is None:
        return "no-product", "returned no matrix"
    own = torch.tensor(product)
    if own.shape != right.shape:
        return "shape", f"returned {tuple(own.shape)}, and the product is {tuple(right.shape)}"
    if torch.equal(own, right):
        return None
    if name == "par_matmul_by_row":
        rows = [index for index in range(len(right)) if not torch.equal(own[index], right[index])]
        owners = [r for r, part in enumerate(torch.arange(len(right)).tensor_split(RANKS)) if rows[0] in part]
        return "wrong-rows", f"has other rows from row {rows[0]} on, which rank {owners[0]} computes"
    terms = [a @ b for a, b in zip(A.tensor_split(RANKS, 1), B.tensor_split(RANKS, 0), strict=True)]
    found = fit(own, [term for term in terms if term.any()])
    counts = [round(x) for x in found] if found is not None and len(found) == RANKS else []
    if 0 in counts:
        return "term-missing", f"lacks the product of rank {counts.index(0)}"
    return "wrong-product", "has another matrix than the sum of the ranks' products"


def try_case(name: str, submission: Submission) -> Verdict:
    """Run one case of the chapter on deadlocks with the student's cure."""
    verdict = Verdict(f"{name}: {RANKS} ranks")
    values = {"case": name.replace("_", "-"), "cure": True, "timeout": 60}
    values |= settings_of_world(RANKS, submission.folder / name)
    reports = submission.run_ranks(RANKS, _exchange, values)
    if found := trouble(reports):
        return verdict.fails(*found, printed=reports)
    for rank, (report, needed) in enumerate(zip(reports, SENT_BYTES[name], strict=True)):
        if report.facts["sent"] < needed:
            told = f"rank {rank} sends {report.facts['sent']:,} bytes instead of {needed:,}"
            return verdict.fails("left-out", [f"{told}: a cure must not leave out what is to be exchanged"])
        if name == "both_send" and (others := set(report.facts["contents"]) - {rank}):
            told = (
                f"rank {rank} sends a tensor of {others.pop():g}, such as it has received, instead of {rank}, its own"
            )
            return verdict.fails("not-its-own", [f"{told}: neighbors exchange their own tensors"])
    return verdict.passes("all ranks finish, and exchange all that they should")


def _exchange(rank: int, script: Path, values: dict[str, Any]) -> Facts:
    module = load(script)
    run: Run[Any] = Run(settings_for(rank, module.DEFAULTS, RunSettings, values), script)
    contents: set[float] = set()  # numbers in what is sent

    def keep_what_is_sent(pending: Pending) -> None:
        for tensor in pending.result() if pending.name.way == "send" else []:
            if tensor.numel() > 1:  # no mere sign to the other rank
                contents.update(tensor.unique().tolist())

    context = context_of()
    context.observers.append(keep_what_is_sent)
    module.try_case(run)
    run.close()
    sent = sum(count for kind, count in context.ledger.sent_bytes.items() if kind != "control")
    return {"sent": sent, "contents": sorted(contents)}
