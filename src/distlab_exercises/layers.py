"""Tries layers of which each rank holds a slice, beside whole layers of torch, forward and backward."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distlab.run.commands import LAB
from distlab.settings.slices import SlicesPerRank
from distlab_compare.mistakes import differs
from distlab_exercises.loading import Solution
from distlab_exercises.verdict import Wrong, expect, where

RANKS = 2
BATCH, INPUTS, INNER, OUTPUTS, WORDS = 5, 6, 8, 4, 10


class Pair(nn.Module):
    """Two whole linear layers, with a GELU and dropout between them."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.first_linear = nn.Linear(INPUTS, INNER, bias=False)
        self.between = nn.Sequential(*between)
        self.second_linear = nn.Linear(INNER, OUTPUTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second_linear(self.between(self.first_linear(x)))
        return y


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


def between() -> list[nn.Module]:
    return [nn.GELU(), nn.Dropout(0.5)]


# By class: its arguments, the whole module, and along which dimension each weight is split.
WHOLE: dict[str, tuple[tuple[Any, ...], Callable[[], nn.Module], tuple[int, ...]]] = {
    "ColWiseLinear": ((INPUTS, OUTPUTS), lambda: linear(INPUTS, OUTPUTS), (0,)),
    "Embedding": ((WORDS, OUTPUTS), lambda: nn.Embedding(WORDS, OUTPUTS), (1,)),
    "ColRowLinearPair": ((INPUTS, INNER, OUTPUTS, between()), lambda: Pair(*between()), (0, 1)),
}


def try_conjugate(solution: Solution) -> list[str]:
    """Compare f or g of a student's file, an autograd Function, with the right results, forward and backward."""
    rank, run = solution.rank, solution.join(RANKS, SlicesPerRank())
    generator = torch.Generator().manual_seed(4)
    xs, grads = (list(torch.randn(RANKS, BATCH, INPUTS, generator=generator)) for _ in range(2))  # by rank
    is_f = solution.name == "CopyTo"
    xs, grads = (xs[:1] * RANKS, grads) if is_f else (xs, grads[:1] * RANKS)  # equal on all ranks
    x, grad = xs[rank].clone().requires_grad_(), grads[rank].clone()
    result = solution.function.apply(x)
    result.backward(grad)
    assert x.grad is not None
    run.close()
    is_kept = torch.equal(x, xs[rank]) and torch.equal(grad, grads[rank])
    with where(f"rank {rank}"):
        expect(is_kept, "in-place", f"{solution.name} changes what it is given")
        if is_f:
            expect(torch.equal(result, x), "forward", "forward returns something else than its input")
            _expect_sum(x.grad, grads, rank, "f", "backward: the gradient")
        else:
            _expect_sum(result, xs, rank, "g", "forward: the result")
            again = "gradients that the ranks have alike were added up; the gradient of a sum is passed on (g)"
            expect(differs(x.grad, RANKS * grad), "g-adds-again", f"backward: {again}")
            told = "backward: the gradient is not passed on as it is, as that of a sum is (g)"
            expect(not differs(x.grad, grad), "g-backward", told)
    return ["what it passes on, forward and backward"]


def _expect_sum(found: Tensor, given: list[Tensor], rank: int, letter: str, what: str) -> None:
    total, own = torch.stack(given).sum(0), f"{what} is the rank's own: the ranks' were not added up ({letter})"
    expect(differs(found, given[rank]), f"{letter}-missing", own)
    mean = f"{what} is the mean of the ranks', not their sum ({letter})"
    expect(differs(RANKS * found, total), f"{letter}-averages", mean)
    expect(not differs(found, total), f"{letter}-wrong", f"{what} is not the sum of the ranks' ({letter})")


def try_layer(solution: Solution) -> list[str]:
    """Compute with a class of a student's file, forward and backward."""
    sys.path.insert(0, str(LAB / "TP" / "sentiment"))  # where the chapter's scripts import each other
    rank, run = solution.rank, solution.join(RANKS, SlicesPerRank())
    importlib.import_module("pcomm").init(RANKS)
    sizes, build, dims = WHOLE[solution.name]
    torch.manual_seed(1)
    whole = build()
    torch.manual_seed(1)
    own = solution.function(*sizes)
    with where(f"rank {rank}"):
        _check_weights(own, whole, dims, rank)
        _check_result(own.eval(), whole.eval(), dims, rank)
        if solution.name == "ColRowLinearPair":
            _check_dropout(own.train(), whole.train())
    run.close()
    return ["output, gradients of input and weights as in one process"]


def _check_dropout(own: nn.Module, whole: nn.Module) -> None:
    results = []
    for module in (own, whole):
        torch.manual_seed(3)  # on all ranks, as in training
        results.append(module(torch.ones(BATCH, INPUTS)))
    told = "dropout between the layers drops other numbers than in one process"
    expect(not differs(*results), "dropout", f"{told}: for_shards(module) prepares what is between them")


def _check_weights(own: nn.Module, whole: nn.Module, dims: tuple[int, ...], rank: int) -> None:
    weights = list(own.named_parameters())
    names = ", ".join(name for name, _ in weights) or "none"
    expected = "one, its weight" if len(dims) == 1 else f"{len(dims)}, its weights"
    told = f"the layer's parameters are {names}; it should have {expected}, and no biases"
    expect(len(weights) == len(dims), "parameters", told)
    torch.manual_seed(1)
    for (name, weight), right, dim in zip(weights, whole.parameters(), dims, strict=True):
        slices = right.detach().chunk(RANKS, dim)
        told = f"{name} is {tuple(weight.shape)}, and its slice is {tuple(slices[rank].shape)}"
        expect(weight.shape == slices[rank].shape, "shape", told)
        drawn = nn.Embedding(*weight.shape) if isinstance(whole, nn.Embedding) else linear(*weight.shape[::-1])
        if torch.equal(weight.detach(), slices[rank]):
            continue
        [as_slice] = drawn.parameters()
        same = "ranks with one seed draw the same slice; draw the whole weight, and keep this rank's shard of it"
        expect(not torch.equal(weight, as_slice), "slice-drawn", f"{name} was drawn as a slice: {same}")
        for other, part in enumerate(slices):
            expect(not torch.equal(weight, part), "wrong-slice", f"{name} is the slice of rank {other}")
        raise Wrong("other-weights", f"{name} is not this rank's slice of the weight that one process draws")


def _check_result(own: nn.Module, whole: nn.Module, dims: tuple[int, ...], rank: int) -> None:
    torch.manual_seed(2)
    is_embedding, is_pair = isinstance(whole, nn.Embedding), isinstance(whole, Pair)
    x = torch.randint(WORDS, (BATCH,)) if is_embedding else torch.randn(BATCH, INPUTS)
    weigh = torch.randn(BATCH, OUTPUTS)
    inputs, copy = x.clone().requires_grad_(not is_embedding), x.clone().requires_grad_(not is_embedding)
    result, right = own(inputs), whole(copy)
    told = f"the output is {tuple(result.shape)}, and should be {tuple(right.shape)}"
    expect(result.shape == right.shape, "shape", told)
    swapped = torch.equal(result.sort(-1)[0], right.sort(-1)[0])
    why = "has the ranks' slices in the wrong order" if swapped else "differs from that of the whole layer"
    why = "is not the sum of the ranks' terms (g)" if is_pair else why
    expect(not differs(result, right), "output", f"the output {why}")
    (result * weigh).sum().backward()
    (right * weigh).sum().backward()
    for (name, weight), of_whole, dim in zip(own.named_parameters(), whole.parameters(), dims, strict=True):
        assert of_whole.grad is not None
        expected = of_whole.grad.chunk(RANKS, dim)[rank]
        if weight.grad is None:
            raise Wrong("no-gradient", f"{name} gets no gradient")
        why = f"is {RANKS} times too large: gradients that the ranks have alike were added up"
        told = f"the gradient of {name} {why}; the gradient of a sum is passed on (g)"
        expect(differs(weight.grad, RANKS * expected), "g-adds-again", told)
        told = f"the gradient of {name} is not that of its slice of the whole weight"
        expect(not differs(weight.grad, expected), "weight-gradient", told)
    if copy.grad is not None:
        if inputs.grad is None:
            raise Wrong("no-gradient", "the input gets no gradient")
        told = "the gradient of the input is not the sum of what comes back from the ranks' slices (f)"
        expect(not differs(inputs.grad, copy.grad), "f-missing", told)
