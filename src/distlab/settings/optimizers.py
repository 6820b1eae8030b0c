"""The values of `--optimizer`; their classes are in `distlab.run.model`."""

from typing import Literal

OptimizerName = Literal["adam", "adamw", "sgd"]
MOMENTS: dict[str, int] = {"adam": 2, "adamw": 2, "sgd": 0}  # tensors that the optimizer keeps for each weight


def moments_of(optimizer: str) -> int:
    """Return the number of tensors that an optimizer keeps for each weight; one of a script's own counts like Adam."""
    return MOMENTS.get(optimizer, MOMENTS["adam"])
