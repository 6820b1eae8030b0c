"""The learning rate of each step: `--warmup-steps`, `--lr-schedule` and `--min-lr`."""

import math
from collections.abc import Callable
from typing import Literal

LRSchedule = Literal["constant", "cosine", "linear"]
# How the learning rate falls: in words, and (share of the steps done) -> the share of the fall that is left.
CURVES: dict[LRSchedule, tuple[str, Callable[[float], float]]] = {
    # Loshchilov and Hutter, arXiv 1608.03983
    "cosine": ("half a cosine", lambda done: (1 + math.cos(math.pi * done)) / 2),
    "linear": ("a line", lambda done: 1 - done),
}


def learning_rate(
    step: int, steps: int, lr: float, warmup_steps: int = 0, schedule: LRSchedule = "constant", min_lr: float = 0.0
) -> float:
    """Return the learning rate of a step. It depends only on the arguments, so it continues in a resumed run.

    It rises linearly to `lr` over the first `warmup_steps` steps. Then it falls from `lr` towards `min_lr`, along a
    curve of `CURVES`; it would reach `min_lr` right after the last step.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return min_lr + (lr - min_lr) * CURVES[schedule][1](done)


def lr_remarks(steps: int, lr: float, warmup_steps: int, schedule: LRSchedule, min_lr: float) -> list[str]:
    """Return lines to print about a learning rate that changes."""
    parts = [f"rises to {lr:g} over {warmup_steps:,} steps"] if warmup_steps else []
    if schedule != "constant":
        parts.append(f"falls from {lr:g} to {min_lr:g} along {CURVES[schedule][0]}, until step {steps:,}")
    return [f"the learning rate {' and then '.join(parts)}"] if parts else []
