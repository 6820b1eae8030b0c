"""Tries the classifier of linear layers, and the loop that trains it, on one process."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from distlab_compare.mistakes import differs, name_gradient
from distlab_exercises.loading import Solution
from distlab_exercises.verdict import Wrong, expect

STEPS, LR = 3, 0.1
MODEL: dict[str, Any] = {"n_layers": 3, "d_in": 24, "d_hidden": 40, "n_classes": 5}
VALUES = MODEL | {"niters": STEPS, "lr": LR, "batch_size": 6, "train_size": 60}
GAIN = nn.init.calculate_gain("tanh")


def try_classifier(solution: Solution) -> list[str]:
    """Compare the results of a student's class `MLP`, or of each call of its `train_step`, with the right ones."""
    run = solution.join(1, solution.module.DEFAULTS, **VALUES)
    if solution.name == "MLP":
        _check_model(solution.function(run.settings), run.settings)
        return ["its layers, their first weights, the logits and the loss"]
    _check_steps(solution.module, run)
    return ["in each step, the gradient of this batch and one update"]


def _check_model(model: nn.Module, config: Any) -> None:
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    widths = [config.d_in, *[config.d_hidden] * (config.n_layers - 1), config.n_classes]
    right = [(b, a) for a, b in itertools.pairwise(widths)]
    expect(all(len(shape) > 1 for shape in shapes), "bias", "it has biases, and should have none")
    expect(shapes == right, "layers", f"its parameters are {shapes}, and should be {right}")
    for number, parameter in enumerate(model.parameters()):
        bound = GAIN * (3 / parameter.shape[1]) ** 0.5
        told = f"layer {number}: its weights are not kaiming-uniform for tanh, within {bound:.2f}"
        expect(0.9 * bound < float(parameter.detach().abs().max()) <= bound, "first-weights", told)
    data, targets = torch.randn(8, config.d_in), torch.randint(config.n_classes, (8,))
    logits, loss = model(data, targets)
    weights: list[Tensor] = list(model.parameters())
    expected = _logits(weights, data)
    told = f"its logits are {tuple(logits.shape)}, and should be {tuple(expected.shape)}"
    expect(logits.shape == expected.shape, "logits", told)
    if differs(logits, expected):
        variants = {
            "lack the tanh between the layers": _logits(weights, data, between=False),
            "also went through a tanh after the last layer": _logits(weights, data, after_last=True),
            "are probabilities: they went through a softmax": expected.softmax(-1),
            "went through a log-softmax": expected.log_softmax(-1),
        }
        known = [sentence for sentence, variant in variants.items() if not differs(logits, variant)]
        others = "differ from those of linear layers with tanh between them"
        raise Wrong("logits", f"its logits {[*known, others][0]}")
    is_mean = loss is not None and not differs(loss, functional.cross_entropy(expected, targets))
    expect(is_mean, "loss", "its loss is not the mean cross-entropy of the logits")
    expect(model(data)[1] is None, "loss", "without targets, the loss should be None")


def _logits(weights: list[Tensor], data: Tensor, after_last: bool = False, between: bool = True) -> Tensor:
    for number, weight in enumerate(weights):
        data = functional.linear(data, weight)
        if after_last if number == len(weights) - 1 else between:
            data = torch.tanh(data)
    return data


def _check_steps(student: Any, run: Any) -> None:
    rows: list[Any] = []  # of each step's batch
    seen: list[tuple[list[Tensor], list[Tensor]]] = []  # the weights and their gradients before each update
    track, count_steps = run.track, run.count_steps

    def count_and_keep(*args: Any, **options: Any) -> Iterator[tuple[int, Any]]:
        for step, batch in count_steps(*args, **options):
            rows.append(batch)
            yield step, batch

    def track_and_watch(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        def before_update(*_: object) -> None:
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            seen.append((weights, gradients))

        optimizer.register_step_pre_hook(before_update)
        track(model, optimizer, *args)

    run.track, run.count_steps = track_and_watch, count_and_keep
    train_set, _ = student.gen_dataset(run.settings)
    student.train(run)
    run.close()
    times = f"the weights were updated {len(seen)} times in {STEPS} steps: once in each step is right"
    expect(len(seen) == STEPS, "steps", times)
    before: list[Any] = [None] * len(seen[0][0])  # the gradients of the step before
    updated = seen[0][0]
    for step, (batch, (weights, gradients)) in enumerate(zip(rows, seen, strict=True)):
        told = f"step {step - 1}: the weights were not updated by -lr times their gradients"
        expect(not any(map(differs, weights, updated)), "update", told)
        points, labels = train_set[batch]
        leaves = [weight.clone().requires_grad_() for weight in weights]
        right = torch.autograd.grad(functional.cross_entropy(_logits(leaves, points), labels), leaves)
        for number, (own, expected) in enumerate(zip(gradients, right, strict=True)):
            if differs(own, expected):
                mistake = name_gradient(own, [[expected]], before[number], own=-1)
                raise Wrong(mistake.name, f"step {step}: the gradient of weight {number} {mistake.sentence}")
        before = list(right)
        updated = [weight - LR * gradient for weight, gradient in zip(weights, right, strict=True)]
