"""Tries layers of which each rank holds a slice, beside whole ones of torch, forward and backward."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlab.run.commands import LAB
from distlab.run.run import Run
from distlab.run.settings import RunSettings, WorldSize
from distlab_exercises.loading import load, settings_for, settings_of_world
from distlab_exercises.ranks import Facts, Submission, trouble
from distlab_exercises.shares import differs
from distlab_exercises.verdict import Verdict, Wrong

RANKS = 2
BATCH, INPUTS, INNER, OUTPUTS, WORDS = 5, 6, 8, 4, 10


@dataclass
class Settings(WorldSize, RunSettings):
    """Ranks, and no training."""


class Pair(nn.Module):
    """Two whole linear layers, with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first_linear = nn.Linear(INPUTS, INNER, bias=False)
        self.between = nn.GELU()
        self.second_linear = nn.Linear(INNER, OUTPUTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second_linear(self.between(self.first_linear(x)))
        return y


def _linear() -> nn.Module:
    return nn.Linear(INPUTS, OUTPUTS, bias=False)


# By class: its arguments, the whole module, and along which dimension each weight is split.
WHOLE: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module], tuple[int, ...]]] = {
    "ColWiseLinear": ((INPUTS, OUTPUTS), _linear, (0,)),
    "Embedding": ((WORDS, OUTPUTS), lambda: nn.Embedding(WORDS, OUTPUTS), (1,)),
    "ColRowLinearPair": ((INPUTS, INNER, OUTPUTS), Pair, (0, 1)),
}


def try_layer(name: str, submission: Submission) -> Verdict:
    """Compute with a class of a student's file on two ranks, forward and backward."""
    verdict = Verdict(f"{name}: {RANKS} ranks")
    reports = submission.run_ranks(RANKS, _compute, name, settings_of_world(RANKS, submission.folder / name))
    if found := trouble(reports):
        return verdict.fails(*found, printed=reports)
    for report in reports:
        if wrong := report.facts["wrong"]:
            return verdict.fails(wrong[0], [f"rank {report.rank}: {wrong[1]}"], printed=reports)
    return verdict.passes("output, gradients of input and weights as in one process")


def _compute(rank: int, script: Path, name: str, values: dict[str, Any]) -> Facts:
    sys.path.insert(0, str(LAB / "TP" / "sentiment"))  # where the chapter's scripts import each other
    run: Run[Any] = Run(settings_for(rank, Settings(), Settings, values), script)
    importlib.import_module("pcomm").init(RANKS)
    student = load(script)
    sizes, build, dims = WHOLE[name]
    torch.manual_seed(1)
    whole = build()
    torch.manual_seed(1)
    own = getattr(student, name)(*sizes)
    wrong = _wrong_weights(own, whole, dims, rank) or _wrong_result(own, whole, name, dims, rank)
    run.close()
    return {"wrong": wrong}


def _wrong_weights(own: nn.Module, whole: nn.Module, dims: tuple[int, ...], rank: int) -> Wrong:
    weights = list(own.named_parameters())
    if len(weights) != len(dims):
        names = ", ".join(name for name, _ in weights) or "none"
        expected = "one, its weight" if len(dims) == 1 else f"{len(dims)}, its weights"
        return "parameters", f"the layer's parameters are {names}; it should have {expected}, and no biases"
    for (name, weight), right, dim in zip(weights, whole.parameters(), dims, strict=True):
        slices = right.detach().chunk(RANKS, dim)
        if weight.shape != slices[rank].shape:
            return "shape", f"{name} is {tuple(weight.shape)}, and its slice is {tuple(slices[rank].shape)}"
        for other, part in enumerate(slices):
            if other != rank and torch.equal(weight.detach(), part):
                return "wrong-slice", f"{name} is the slice of rank {other}"
        if not torch.equal(weight.detach(), slices[rank]):
            return "other-weights", f"{name} is not this rank's slice of the weight that one process draws"
    return None


def _wrong_result(own: nn.Module, whole: nn.Module, name: str, dims: tuple[int, ...], rank: int) -> Wrong:
    torch.manual_seed(2)
    is_embedding = name == "Embedding"
    x = torch.randint(WORDS, (BATCH,)) if is_embedding else torch.randn(BATCH, INPUTS)
    weigh = torch.randn(BATCH, OUTPUTS)
    inputs = x.clone() if is_embedding else x.clone().requires_grad_()
    copy = x.clone() if is_embedding else x.clone().requires_grad_()
    result, right = own(inputs), whole(copy)
    if result.shape != right.shape:
        return "shape", f"the output is {tuple(result.shape)}, and should be {tuple(right.shape)}"
    if differs(result, right):
        why = "is another one than that of the whole layer"
        if name == "ColRowLinearPair":
            why = "is not the sum of the ranks' terms (g)"
        elif torch.equal(result.flip(-1).sort(-1)[0], right.flip(-1).sort(-1)[0]):
            why = "has the ranks' slices in the wrong order"
        return "output", f"the output {why}"
    (result * weigh).sum().backward()
    (right * weigh).sum().backward()
    for (weight_name, weight), of_whole, dim in zip(own.named_parameters(), whole.parameters(), dims, strict=True):
        assert of_whole.grad is not None
        expected = of_whole.grad.chunk(RANKS, dim)[rank]
        if weight.grad is None:
            return "no-gradient", f"{weight_name} gets no gradient"
        if not differs(weight.grad, RANKS * expected):
            why = f"is {RANKS} times too large: gradients that the ranks have alike were added up"
            return "g-adds-again", f"the gradient of {weight_name} {why}; the gradient of a sum is passed on (g)"
        if differs(weight.grad, expected):
            return "weight-gradient", f"the gradient of {weight_name} is not that of its slice of the whole weight"
    if is_embedding:
        return None
    assert copy.grad is not None
    if inputs.grad is None:
        return "no-gradient", "the input gets no gradient"
    if differs(inputs.grad, copy.grad):
        return "f-missing", "the gradient of the input is not the sum of what comes back from the ranks' slices (f)"
    return None
