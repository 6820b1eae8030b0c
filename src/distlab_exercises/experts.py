"""Tries the parts of expert parallelism: permutations, the exchange of rows, the scale and the norm of gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.axes.layout import STAGES
from distlab.axes.placement import Placement, place
from distlab.settings.experts import ExpertParallelSettings
from distlab_exercises.loading import Solution
from distlab_exercises.verdict import expect, where

RANKS, EACH, WIDTH = 3, 2, 4  # experts of a rank, numbers of a row
COUNTS = [[2, 0, 3, 1, 0, 4], [0, 0, 0, 0, 0, 0], [1, 5, 0, 0, 2, 1]]  # by rank, the rows for each expert


def try_permutation(solution: Solution) -> list[str]:
    """Undo permutations with a student's function."""
    for rows in (4, 0, 1000):
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(3))
        inverse = solution.function(order.clone())
        with where(f"{rows} rows"):
            told = f"it should be (rows,) of int64, like `order`; it is {tuple(inverse.shape)} of {inverse.dtype}"
            expect(inverse.shape == order.shape and inverse.dtype == order.dtype, "shape", told)
            told = "it is `order` itself, which sorts the rows once more"
            expect(rows < 4 or not inverse.equal(order), "the-same", told)
            expect(order[inverse].equal(torch.arange(rows)), "wrong-order", "the rows are not in their old order")
    return ["all rows are where they were, also if there are none"]


def try_scale(solution: Solution) -> list[str]:
    """Combine gradients with a student's function: of a dense weight, and of an expert on each rank."""
    rank, run = solution.rank, _join(solution, solution.module.DEFAULTS)
    dense, expert, without = (torch.nn.Parameter(torch.zeros(WIDTH)) for _ in range(3))
    layer, shares = "model.layers.0", [1.0 + other for other in range(RANKS)]
    dense.grad, expert.grad = torch.full((WIDTH,), shares[rank]), torch.full((WIDTH,), 30 * shares[rank])
    names = f"{layer}.self_attn.q_proj.weight", f"{layer}.mlp.experts.{rank}.up_proj.weight", "lm_head.weight"
    solution.function(dict(zip(names, (dense, expert, without), strict=True)))
    run.close()
    with where(f"rank {rank}"):
        found, total, own = dense.grad[0].item(), sum(shares), 30 * shares[rank]
        told = (
            f"a gradient of a dense weight is {found:g}, where the ranks' shares are 1, 2 and 3; it should be {total:g}"
        )
        for value, mistake in ((shares[rank], "not-added"), (total / RANKS, "averaged")):
            expect(found != value, mistake, told)
        expect(torch.allclose(dense.grad, torch.full((WIDTH,), total)), "wrong-dense", told)
        found = expert.grad[0].item()
        told = f"an expert's gradient was {own:g}, which already is the sum, and is {found:g}"
        mixed = f"{told}: it was added up with those of other experts, which are other weights"
        expect(found == own or found not in (30 * total, 10 * total), "experts-mixed", mixed)
        expect(torch.allclose(expert.grad, torch.full((WIDTH,), own)), "expert-scaled", told)
    return ["the gradients of the whole batch, of dense weights and of experts"]


def try_norm(solution: Solution) -> list[str]:
    """Compute the norm of gradients with a student's function: a dense weight, and an expert on each rank."""
    rank, run = solution.rank, _join(solution, ExpertParallelSettings())
    dense, expert, without = (torch.zeros(4, requires_grad=True) for _ in range(3))
    dense.grad = torch.ones(4)
    place(expert, Placement(apart=(STAGES, "ep")))
    if rank:  # the experts of rank 0 have none
        expert.grad = torch.full((4,), 2.0 * rank)
    squares = [16.0 * other**2 for other in range(RANKS)]
    norm = solution.function([dense, expert, without], run.grid, "the norm", torch.device("cpu")).wait()
    run.close()
    right = (4 + sum(squares)) ** 0.5
    with where(f"rank {rank}"):
        told = f"the norm is {norm:.4g}, and should be {right:.4g}: "
        is_again = abs(norm**2 - 4 * RANKS - sum(squares)) < 1e-3
        expect(not is_again, "counted-again", f"{told}a weight that {RANKS} ranks hold counts {RANKS} times")
        is_own = abs(norm**2 - 4 - squares[rank]) < 1e-3
        expect(not is_own, "own-norm", f"{told}the experts of other ranks are missing, so ranks clip by other norms")
        expect(abs(norm - right) < 1e-4, "wrong-norm", f"{told}the root of the sum of all squares")
    return ["one norm on all ranks, in which each weight counts once"]


def try_dispatch(solution: Solution) -> list[str]:
    """Bring rows to experts with a student's function; expert e multiplies a row by e + 1."""
    rank, run = solution.rank, _join(solution, solution.module.DEFAULTS)
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
    outputs = solution.function(leaf, counts, compute)
    with where(f"rank {rank}"):  # at once, as there is no backward pass with another shape, for which the others wait
        told = f"the outputs are {tuple(outputs.shape)}, and should be {tuple(rows.shape)}: one for each row"
        expect(outputs.shape == rows.shape, "shape", told)
    outputs.backward(grad)
    run.close()
    factor = factors.repeat_interleave(counts).unsqueeze(1)
    with where(f"rank {rank}"):
        told = "some rows have met an expert that is not theirs, or their outputs are not in their order"
        expect(torch.allclose(outputs, rows * factor), "wrong-rows", told)
        told = "the rows have no gradient: backward must return it, in the order of the rows that were sent"
        expect(leaf.grad is not None, "no-gradient", told)
        assert leaf.grad is not None
        for times in (RANKS, RANKS**2):
            told = f"the gradients of rows are {times} times as large as they should be: they only travel"
            is_scaled = len(rows) > 0 and torch.allclose(leaf.grad, times * grad * factor)
            expect(not is_scaled, "scaled", told)
        expect(torch.allclose(leaf.grad, grad * factor), "wrong-gradient", "the gradients of rows are not theirs")
    return ["outputs and gradients of all rows, also of a rank that has none"]


def _join(solution: Solution, defaults: object) -> Any:
    return solution.join(RANKS, defaults, ExpertParallelSettings, experts=RANKS * EACH)
