"""Every exercise: its skeleton fails because a part is missing, the solution passes, mistakes are called by name."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.attempts import ATTEMPTS
from support.exercises_attempts import PATIENCE, SHORT_PATIENCE, Attempt, judge, smallest
from torch import nn

from distlab.collectives.simulation import SimulatedEndpoint, SimulatedWorld
from distlab_exercises.catalogue import EXERCISES
from distlab_exercises.checker import check, prepare
from distlab_exercises.classifier import MODEL, try_classifier
from distlab_exercises.experts import try_permutation
from distlab_exercises.over_mpi import Communicator
from distlab_exercises.ranks import Patience, Submission
from distlab_exercises.skeleton import write_out
from distlab_exercises.training import expected_of
from distlab_exercises.verdict import Verdict, Wrong


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare()


@pytest.fixture(autouse=True)
def _failures_are_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab_exercises.ranks.SECONDS_FOR_CONSEQUENCES", 0.3)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_skeleton_fails_for_what_is_missing_and_the_solution_passes(name: str, tmp_path: Path) -> None:
    exercise, path = smallest(EXERCISES[name]), tmp_path / EXERCISES[name].file_name
    path.write_text(text := write_out(exercise, path))
    imported = re.findall(r"^(?:import|from) .*", text, re.MULTILINE)
    assert len(imported) == len({*imported}), "once each"
    has_deadlocks = exercise.functions == "case"
    first = next(iter(check(exercise, path, SHORT_PATIENCE if has_deadlocks else PATIENCE)))
    assert first.mistake == ("deadlock" if has_deadlocks else "not-written")
    assert has_deadlocks or first.sentences[0].startswith("not written yet: ")
    assert "NotImplementedError" not in first.sentences[0]
    numbers = re.findall(r" \(line (\d+)", first.sentences[0])
    for number in numbers:
        assert "raise NotImplementedError(" in path.read_text().splitlines()[int(number) - 1]
    assert bool(numbers) != has_deadlocks, "where it is missing"
    path.write_text(write_out(exercise, path, solved=True))
    right = list(check(exercise, path, PATIENCE))
    assert [verdict.sentences for verdict in right if not verdict.passed] == []
    assert len(right) == len(exercise.trials) + len(exercise.tried)
    if name == "mydp":
        assert not [remark for remark in right[-1].remarks if "after the backward pass" in remark]


@pytest.mark.parametrize(
    ("name", "attempt"), ATTEMPTS, ids=[f"{name}-{attempt.mistake or 'right'}" for name, attempt in ATTEMPTS]
)
def test_an_attempt_is_judged_by_what_it_does(name: str, attempt: Attempt, tmp_path: Path) -> None:
    judge(name, attempt, tmp_path)


class Classifier(nn.Module):
    """Linear layers with tanh between them, and a change of the logits."""

    def __init__(self, change: nn.Module) -> None:
        super().__init__()
        first, second, last = (nn.Linear(*size, bias=False) for size in ((24, 40), (40, 40), (40, 5)))
        for layer in (first, second, last):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="tanh")
        self.layers = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last, change)

    def forward(self, data: torch.Tensor, _: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        return self.layers(data).detach(), None


@pytest.mark.filterwarnings("error")  # logits have gradients, of which torch would warn the student
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (nn.Softmax(-1), "are probabilities: they went through a softmax"),
        (nn.LogSoftmax(-1), "went through a log-softmax"),
        (nn.ReLU(), "differ from those of linear layers with tanh between them"),
        (nn.Flatten(0), r"are \(40,\), and should be \(8, 5\)"),
    ],
    ids=["softmax", "log-softmax", "other", "shape"],
)
def test_what_became_of_logits_is_told(change: nn.Module, told: str) -> None:
    run: Any = SimpleNamespace(settings=SimpleNamespace(**MODEL))
    solution: Any = SimpleNamespace(name="MLP", join=lambda *_, **__: run, module=SimpleNamespace(DEFAULTS=None))
    solution.function = lambda _: Classifier(change)
    with pytest.raises(Wrong, match=f"^its logits {told}$"):
        try_classifier(solution)


def test_the_run_of_one_process_is_computed_once_for_all_files() -> None:
    trial = smallest(EXERCISES["dp-ga"]).trials[0]
    assert expected_of(trial) is expected_of(trial)


def test_a_script_is_trained_in_each_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab_exercises.training.try_layout", lambda *_: None)
    trials = [verdict.trial for verdict in check(EXERCISES["dp-ga"], tmp_path / "mine.py")]
    assert trials == ["train: 3 replicas, 2 micro-batches", "train: 2 replicas, 1 micro-batch"]


def test_nothing_is_trained_after_a_function_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anybody waited for longer, after a deadlock, than before."""
    seen: list[float] = []

    def judge_by_turns(verdict: Verdict, _: object, submission: Submission, *args: object) -> Verdict:
        seen.append(submission.patience.still)
        verdict.passed = len(seen) > 1
        verdict.mistake = "" if verdict.passed else "deadlock"
        return verdict

    monkeypatch.setattr("distlab_exercises.checker._judge", judge_by_turns)
    several = next(each for each in EXERCISES.values() if len(each.tried) > 1 and each.trials)
    for still, later in ((8.0, 3.0), (1.0, 1.0)):
        seen.clear()
        verdicts = list(check(several, tmp_path / "mine.py", Patience(still=still)))
        assert [verdict.trial.partition(":")[0] for verdict in verdicts] == [
            name.rpartition(":")[2] for name in several.tried
        ]
        assert seen == [still, *[later] * (len(several.tried) - 1)]


def test_the_inverse_of_a_permutation_is_of_whole_numbers() -> None:
    solution: Any = SimpleNamespace(function=lambda order: order.argsort().int())
    with pytest.raises(Wrong, match=r"^4 rows: it should be \(rows,\) of int64.*is \(4,\) of torch\.int32$"):
        try_permutation(solution)


def test_the_two_messages_of_a_call_may_have_tags_of_their_own() -> None:
    def exchange(endpoint: SimulatedEndpoint) -> float:
        own, rank = np.array([float(endpoint.get_rank())]), endpoint.get_rank()
        Communicator(endpoint, None).Sendrecv(own, 1 - rank, 5 + rank, other := np.empty(1), 1 - rank, 6 - rank)
        return float(other[0])

    assert SimulatedWorld(2).run(exchange) == [1, 0]


def test_an_exercise_over_mpi_without_mpi4py_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    judge("mpi", Attempt("no-mpi", "pip install mpi4py mpich", only="get_info"), tmp_path)


SEND_AND_RECEIVE = """stage, last, losses, inputs = dist.get_rank(), dist.get_world_size() - 1, [], x
if stage > 0:
    inputs = torch.empty(*x.shape, width)
    dist.recv(inputs, stage - 1)
    inputs.requires_grad_()
outputs = net(inputs)
if stage < last:
    dist.send(outputs.detach(), stage + 1)
    gradient = torch.empty_like(outputs)
    dist.recv(gradient, stage + 1)
    outputs.backward(gradient)
else:
    losses.append(causalLLMLoss(outputs, x, outputs.shape[-1]) * share)
    losses[-1].backward()
if stage > 0:
    dist.send(inputs.grad, stage - 1)
return losses"""
ADDED_UP = "total = {0}.contiguous().clone()\ntorch.distributed.all_reduce(total)\nreturn total"
MEGATRON = "return x.view_as(x)", ADDED_UP.format("grad"), ADDED_UP.format("x"), "return grad"
PLAIN: dict[str, str | tuple[str, ...]] = {
    "hybrid": "for part in gradients.split(10_000):\n    dist.all_reduce(part, ReduceOp.AVG, replicas.group)",
    "pp-1f1b": SEND_AND_RECEIVE,
    "tp": MEGATRON,
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_plain_calls_of_torch_send_is_counted_like_the_chapters_own(name: str, tmp_path: Path) -> None:
    exercise, path = smallest(EXERCISES[name]), tmp_path / EXERCISES[name].file_name
    path.write_text(Attempt("", "", PLAIN[name]).text(exercise, path))
    *_, verdict = check(exercise, path, PATIENCE)
    assert verdict.passed, verdict.sentences
    assert verdict.sent
    for sent, needed in verdict.sent.values():
        assert needed > 0
        assert sent == needed
    late = ["gradients are sent after the backward pass"] * (exercise.trials[0].replicas > 1)
    assert [remark.partition(";")[0] for remark in verdict.remarks] == late
