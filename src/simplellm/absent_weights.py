"""Parameters without values in memory: those of a model made without weights, or those that other ranks hold.

In place of its values, such a parameter has one NaN that is seen in its shape; views of it take no memory either.
"""

import torch
from torch import Tensor, nn

from simplellm.initial_weights import initial_weight


def absent(parameter: Tensor, device: torch.device | None = None) -> Tensor:
    """Return the stand-in for the values of a parameter (any shape, the same dtype) that are not in memory."""
    return torch.full((1,), torch.nan, dtype=parameter.dtype, device=device or parameter.device).expand(parameter.shape)


def is_absent(parameter: Tensor) -> bool:
    """Return whether a parameter, or a slice of one, is absent; one of a single element never counts as that."""
    return 0 in parameter.stride()


class InitialWeights:
    """The initial weights of a module, by name: one at a time, where they are needed. Its parameters become absent.

    Whoever divides such a model takes its parts from here.
    """

    def __init__(self, module: nn.Module, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                setattr(part, name, nn.Parameter(absent(parameter, device), requires_grad=parameter.requires_grad))

    def __call__(self, name: str) -> Tensor:
        """Return the initial value of a parameter, of the shape that it had before it was sliced."""
        return initial_weight(self._seed, name, self._shapes[name])
