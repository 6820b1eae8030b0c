"""Tries the exchange of rows for experts that ranks share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from distlab.settings.experts import ExpertParallelSettings
from distlab_exercises.loading import join, load
from distlab_exercises.ranks import Facts, Submission
from distlab_exercises.verdict import expect, where

RANKS, EACH, WIDTH = 3, 2, 4  # experts of a rank, numbers of a row
COUNTS = [[2, 0, 3, 1, 0, 4], [0, 0, 0, 0, 0, 0], [1, 5, 0, 0, 2, 1]]  # by rank, the rows for each expert


def try_passage(rank: int, submission: Submission, taken: str) -> Facts:
    """Bring rows to experts with a student's function; expert e multiplies a row by e + 1."""
    del taken
    module = load(submission.script)
    run = join(rank, submission, RANKS, module.DEFAULTS, ExpertParallelSettings, experts=RANKS * EACH)
    counts = torch.tensor(COUNTS[rank])
    own = slice(EACH * rank, EACH * rank + EACH)
    factors = torch.arange(1.0, RANKS * EACH + 1)
    expected_counts = [sum(column[own][expert] for column in COUNTS) for expert in range(EACH)]

    def compute(rows: Tensor, given: Sequence[int]) -> Tensor:
        told = f"the experts of rank {rank} get {list(given)} rows each; it should be {expected_counts}"
        expect(list(given) == expected_counts and len(rows) == sum(given), "wrong-counts", told)
        return rows * factors[own].repeat_interleave(torch.tensor(list(given))).unsqueeze(1)

    generator = torch.Generator().manual_seed(rank)
    rows, grad = torch.randn(2, int(counts.sum()), WIDTH, generator=generator).unbind()
    leaf = rows.clone().requires_grad_()
    outputs = module.through_ranks(leaf, counts, compute)
    factor = factors.repeat_interleave(counts).unsqueeze(1)
    with where(f"rank {rank}"):
        told = f"the outputs are {tuple(outputs.shape)}, and should be {tuple(rows.shape)}: one for each row"
        expect(outputs.shape == rows.shape, "shape", told)
        told = "some rows have met an expert that is not theirs, or their outputs are not in their order"
        expect(torch.allclose(outputs, rows * factor), "wrong-rows", told)
        outputs.backward(grad)
        told = "the rows have no gradient: backward must return it, in the order of the rows that were sent"
        expect(leaf.grad is not None, "no-gradient", told)
        assert leaf.grad is not None
        for times in (RANKS, RANKS**2):
            told = f"the gradients of rows are {times} times as large as they should be: they only travel"
            is_scaled = len(rows) > 0 and torch.allclose(leaf.grad, times * grad * factor)
            expect(not is_scaled, "scaled", told)
        expect(torch.allclose(leaf.grad, grad * factor), "wrong-gradient", "the gradients of rows are not theirs")
    run.close()
    return {"right": ["outputs and gradients of all rows, also of a rank that has none"]}
