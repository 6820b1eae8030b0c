"""A copy of the weights and of the optimizer's state, to undo a step's update."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer


class StateCopy:
    """The state before the last update; `changing` is a context in which the weights are restored."""

    def __init__(
        self, optimizer: Optimizer, changing: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self.optimizer, self._changing = optimizer, changing
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Copy the state as it is now."""
        now = tensors_of(self.optimizer)
        if len(self._kept) != len(now):  # an optimizer has no state before its first update
            self._kept = [tensor.detach().clone() for tensor in now]
        for kept, tensor in zip(self._kept, now, strict=True):
            kept.copy_(tensor)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state from the copy."""
        if len(self._kept) != len(tensors_of(self.optimizer)):
            self.optimizer.state.clear()
        with self._changing():
            for tensor, kept in zip(tensors_of(self.optimizer), self._kept, strict=True):
                tensor.copy_(kept)

    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the weights of an optimizer, and its state of them, always in the same order."""
    parameters = parameters_of(optimizer)
    moments = [value for parameter in parameters for value in optimizer.state.get(parameter, {}).values()]
    return [*parameters, *(value for value in moments if isinstance(value, Tensor))]
