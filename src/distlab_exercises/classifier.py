"""Tries the classifier of linear layers, and the loop that trains it, on one process."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from distlab.run.run import Run
from distlab.run.settings import RunSettings
from distlab_exercises.loading import load, settings_for
from distlab_exercises.shares import differs
from distlab_exercises.verdict import Verdict, Wrong

STEPS, LR = 3, 0.1
VALUES: dict[str, Any] = {
    "niters": STEPS,
    "lr": LR,
    "n_layers": 3,
    "d_in": 24,
    "d_hidden": 40,
    "n_classes": 5,
    "batch_size": 6,
}
VALUES |= {"train_size": 60, "device": "cpu", "out": Path("classifier")}
GAIN = nn.init.calculate_gain("tanh")


def try_classifier(script: Path, module: str, name: str) -> Verdict:
    """Compare the class `MLP` of a student's file with what it should compute, or each step of its `train`."""
    del module
    student = load(script)
    settings: Any = settings_for(0, student.DEFAULTS, RunSettings, VALUES)
    if name == "MLP":
        verdict, right = Verdict("MLP: three layers"), "its layers, their first weights, the logits and the loss"
        found = _wrong_model(student.MLP(settings), settings)
    else:
        verdict, right = Verdict(f"train: {STEPS} steps"), "in each step, the gradient of this batch and one update"
        found = _wrong_steps(student, settings, script)
    return verdict.judged(found, right)


def _wrong_model(model: nn.Module, config: Any) -> Wrong:
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    widths = [config.d_in, *[config.d_hidden] * (config.n_layers - 1), config.n_classes]
    right = [(b, a) for a, b in itertools.pairwise(widths)]
    if any(len(shape) == 1 for shape in shapes):
        return "bias", "it has biases, and should have none"
    if shapes != right:
        return "layers", f"its parameters are {shapes}, and should be {right}"
    for number, parameter in enumerate(model.parameters()):
        bound = GAIN * (3 / parameter.shape[1]) ** 0.5
        if not 0.8 * bound < float(parameter.detach().abs().max()) <= bound:
            return "first-weights", f"layer {number}: its weights are not kaiming-uniform for tanh, within {bound:.2f}"
    data, targets = torch.randn(8, config.d_in), torch.randint(config.n_classes, (8,))
    logits, loss = model(data, targets)
    weights: list[Tensor] = list(model.parameters())
    expected = _logits(weights, data)
    if logits.shape != expected.shape or differs(logits, expected):
        return "logits", f"its logits {_name_logits(logits, expected, weights, data)}"
    if loss is None or differs(loss, functional.cross_entropy(expected, targets)):
        return "loss", "its loss is not the mean cross-entropy of the logits"
    if model(data)[1] is not None:
        return "loss", "without targets, the loss should be None"
    return None


def _logits(weights: list[Tensor], data: Tensor, after_last: bool = False, between: bool = True) -> Tensor:
    for number, weight in enumerate(weights):
        data = functional.linear(data, weight)
        if after_last if number == len(weights) - 1 else between:
            data = torch.tanh(data)
    return data


def _name_logits(logits: Tensor, right: Tensor, weights: list[Tensor], data: Tensor) -> str:
    if logits.shape != right.shape:
        return f"are {tuple(logits.shape)}, and should be {tuple(right.shape)}"
    variants = {
        "lack the tanh between the layers": _logits(weights, data, between=False),
        "went through a tanh after the last layer, too": _logits(weights, data, after_last=True),
        "are probabilities: they went through a softmax": right.softmax(-1),
        "went through a log-softmax": right.log_softmax(-1),
    }
    for sentence, variant in variants.items():
        if not differs(logits, variant):
            return sentence
    return "are others than those of linear layers with tanh between them"


def _wrong_steps(student: Any, settings: Any, script: Path) -> Wrong:
    run: Run[Any] = Run(settings, script)
    rows: list[Any] = []  # of each step's batch
    gradients: list[list[Tensor]] = []
    before: list[list[Tensor]] = []
    track, count_steps = run.track, run.count_steps

    def count_and_keep(*args: Any, **options: Any) -> Iterator[tuple[int, Any]]:
        for step, batch in count_steps(*args, **options):
            rows.append(batch)
            yield step, batch

    def track_and_watch(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        parameters = list(model.parameters())

        def copies(of: list[Any]) -> list[Tensor]:
            return [
                torch.zeros_like(p) if x is None else x.detach().clone() for x, p in zip(of, parameters, strict=True)
            ]

        def before_update(*_: object) -> None:
            gradients.append(copies([parameter.grad for parameter in parameters]))
            before.append(copies(parameters))

        optimizer.register_step_pre_hook(before_update)
        track(model, optimizer, *args)

    run.track, run.count_steps = track_and_watch, count_and_keep  # type: ignore[method-assign]
    train_set, _ = student.gen_dataset(settings)
    student.train(run)
    run.close()
    if len(gradients) != STEPS:
        return "steps", f"the weights were updated {len(gradients)} times in {STEPS} steps: once in each step is right"
    earlier: list[Tensor] = []
    previous: tuple[list[Tensor], list[Tensor]] = [], []
    for step, (batch, weights, own) in enumerate(zip(rows, before, gradients, strict=True)):
        points, labels = train_set[batch]
        leaves = [weight.clone().requires_grad_() for weight in weights]
        right = torch.autograd.grad(functional.cross_entropy(_logits(leaves, points), labels), leaves)
        if any(differs(a, b) for a, b in zip(own, right, strict=True)):
            return _name_gradients(step, own, right, earlier)
        earlier = [a + b for a, b in zip(earlier or [torch.zeros_like(x) for x in right], right, strict=True)]
        if step and any(differs(w, p - LR * g) for w, p, g in zip(weights, *previous, strict=True)):
            return "update", f"step {step - 1}: the weights were not updated by -lr times their gradients"
        previous = weights, list(right)
    return None


def _name_gradients(step: int, own: list[Tensor], right: Any, earlier: list[Tensor]) -> Wrong:
    if not any(gradient.any() for gradient in own):
        return "zero", f"step {step}: the gradients are zero before the update: compute them after they are cleared"
    if earlier and not any(differs(a, b + c) for a, b, c in zip(own, right, earlier, strict=True)):
        return "not-cleared", f"step {step}: the gradients of the steps before are still there: set them to zero"
    return "gradients", f"step {step}: the gradients before the update are not those of this batch's loss"
