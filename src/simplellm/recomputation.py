"""Activations that the backward pass computes again, instead of keeping them from the forward pass.

Less is kept, and a forward pass more is computed (Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv
1604.06174).
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from simplellm.weight_gradients import deferred_to


class Observer(Protocol):
    """Counts activations; what a method returns exists for as long as the tensor is, or would be, in memory."""

    def keep(self, tensor: Tensor) -> object:
        """A tensor is kept, as it would be without recomputation."""

    def keep_again(self, tensor: Tensor) -> object:
        """A tensor is kept because of recomputation: an input, or what has been computed again."""

    def leave_out(self, tensor: Tensor) -> object:
        """A tensor would be kept without recomputation."""


observers: list[Observer] = []  # at the moment
_is_inside = False  # of a call whose activations are computed again


class _CompleteError(Exception):
    """All that the backward pass needs has been computed again."""


class Recomputed:
    """One call of a function of which only the inputs are kept.

    Autograd hands over each tensor that the backward pass will need, and gets a number for it. When the backward pass
    asks for the first one, the function runs again, and what autograd now hands over, in the same order, is kept until
    it has been asked for. That second run ends with the last of these tensors: what would follow, such as the last
    product of a transformer block, is needed for the output only. Its graph is dropped. The gradients go through the
    graph of the first run, so that they, their order and all hooks are those without recomputation.

    Args:
        function: of tensors, to a tensor; it must do the same again, so it may draw no random numbers.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._count = 0  # of the tensors that autograd has handed over
        self._again: dict[int, tuple[Tensor, object]] = {}  # those computed again, by number, and what observers gave

    def __call__(self, *inputs: Tensor) -> Tensor:
        if _is_inside or not torch.is_grad_enabled():
            return self._function(*inputs)
        self._inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        self._observers, self._weight_gradients = list(observers), deferred_to()
        self._observed = [observer.keep_again(x) for x in inputs for observer in self._observers]
        with saved_tensors_hooks(self._number, self._take), _inside():
            return self._function(*inputs)

    def compute(self) -> None:
        """Compute again what the backward pass needs; called by it, unless somebody has done so before."""
        numbers = itertools.count()

        def keep(tensor: Tensor) -> None:
            number = next(numbers)
            self._again[number] = tensor.detach(), [observer.keep_again(tensor) for observer in self._observers]
            if number == self._count - 1:
                raise _CompleteError

        with contextlib.ExitStack() as contexts:
            contexts.enter_context(contextlib.suppress(_CompleteError))
            contexts.enter_context(torch.enable_grad())
            contexts.enter_context(saved_tensors_hooks(keep, self._take))
            contexts.enter_context(_inside())
            if self._weight_gradients is not None:  # layers that defer these save other tensors
                contexts.enter_context(self._weight_gradients.deferred())
            self._function(*self._inputs)

    def _number(self, tensor: Tensor) -> tuple[int, object]:
        self._count += 1
        return self._count - 1, [observer.leave_out(tensor) for observer in self._observers]

    def _take(self, numbered: tuple[int, object]) -> Tensor:
        number = numbered[0]
        if number not in self._again:
            self.compute()
        return self._again.pop(number)[0]


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    """Within a call that is computed again as a whole, have others keep what they would keep by themselves."""
    global _is_inside
    outer, _is_inside = _is_inside, True
    try:
        yield
    finally:
        _is_inside = outer
