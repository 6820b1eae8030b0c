"""The learning rate of each step."""

import math
from typing import Literal

LRSchedule = Literal["constant", "cosine", "linear"]


def learning_rate(
    step: int, steps: int, lr: float, warmup_steps: int = 0, schedule: LRSchedule = "constant", min_lr: float = 0.0
) -> float:
    """Return the learning rate of a step. It depends only on the arguments, so it continues in a resumed run.

    It rises linearly to `lr` over the first `warmup_steps` steps. Then it falls from `lr` towards `min_lr`, along half
    a cosine (Loshchilov and Hutter, arXiv 1608.03983) or a line; it would reach `min_lr` right after the last step.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    left = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
    return min_lr + (lr - min_lr) * left
