"""The values of `--optimizer`; their classes are in `distlab.run.model`."""

from typing import Literal

OptimizerName = Literal["adam", "adamw", "sgd"]
MOMENTS: dict[str, int] = {"adam": 2, "adamw": 2, "sgd": 0}  # tensors that the optimizer keeps for each weight
