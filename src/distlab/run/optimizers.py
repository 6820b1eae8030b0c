"""The optimizers that `--optimizer` names, and the learning rate of each step."""

import math
from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from distlab.comm.torch_patches import without_compiler

KINDS: dict[str, type[Optimizer]] = {"adam": Adam, "adamw": AdamW, "sgd": SGD}
LRSchedule = Literal["constant", "cosine", "linear"]


def build_optimizer(
    name: str,
    parameters: Iterable[Tensor],
    lr: float,
    weight_decay: float | None = None,
    betas: tuple[float, float] | None = None,
) -> Optimizer:
    """One of `KINDS`, with one fused update instead of a pass for each operation.

    Args:
        name: of `KINDS`.
        parameters: of the model.
        lr: learning rate.
        weight_decay: of matrices (`is_decayed`); None is torch's default, 0.01 for "adamw", else 0. "adamw" shrinks the
            weights by it ("decoupled": Loshchilov and Hutter, arXiv 1711.05101), the others add it to the gradient.
        betas: how much of the mean and of the mean square of the gradients "adam" and "adamw" keep in each step; None
            is torch's default.
    """
    kind = without_compiler(KINDS[name])
    options: dict[str, Any] = {} if betas is None else {"betas": betas}
    optimizer = kind(parameters, lr=lr, fused=True, **options)  # type: ignore[call-arg]
    [group] = optimizer.param_groups
    decay = group["weight_decay"] if weight_decay is None else weight_decay
    group["weight_decay"] = 0.0
    if decay:
        decayed = [parameter for parameter in group["params"] if is_decayed(parameter)]
        group["params"] = [parameter for parameter in group["params"] if not is_decayed(parameter)]
        optimizer.add_param_group({**group, "params": decayed, "weight_decay": decay})
    return optimizer


def is_decayed(parameter: Tensor) -> bool:
    """Whether weight decay applies to a parameter: to matrices; the gains of norms, and biases, are left alone."""
    return parameter.dim() >= 2


def learning_rate(
    step: int, steps: int, lr: float, warmup_steps: int = 0, schedule: LRSchedule = "constant", min_lr: float = 0.0
) -> float:
    """The learning rate of a step, a function of nothing but its arguments, so that a resumed run continues it.

    It rises linearly over the first `warmup_steps` steps, of which the last one has `lr`, and then falls from `lr`
    towards `min_lr`, which it would reach in the step after the last one of `steps`: along half a cosine (Loshchilov
    and Hutter, arXiv 1608.03983) or a line.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    done = (step - warmup_steps) / (steps - warmup_steps)
    left = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
    return min_lr + (lr - min_lr) * left
