"""Models without weights: whoever divides such a model takes its parts from the initial weights."""

import torch
from torch import Tensor, nn

from simplellm.initial_weights import initial_weight


class InitialWeights:
    """The initial weights of a module that is made to go without them, by name: one at a time, where they are needed.

    In their place, each parameter is one NaN that is seen in the parameter's shape; views of it take no memory either.
    """

    def __init__(self, module: nn.Module, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                absent = torch.full((1,), torch.nan, dtype=parameter.dtype, device=device).expand(parameter.shape)
                setattr(part, name, nn.Parameter(absent, requires_grad=parameter.requires_grad))

    def __call__(self, name: str) -> Tensor:
        """Return the initial value of a parameter, of the shape that it had before it was sliced."""
        return initial_weight(self._seed, name, self._shapes[name])
