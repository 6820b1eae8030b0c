"""The gradients of linear layers' weights: where they are written, and when they are computed.

Autograd computes a weight's gradient as a separate tensor, and then adds it to `weight.grad` or copies it to the buffer
from which it is sent. Here the matrix product itself writes to that place, or adds to its content, which saves a pass
over the memory of all weights for each micro-batch (in Megatron-LM: "gradient accumulation fusion").

The product can also wait (`simplellm.deferred_gradients`).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from simplellm.autograd import has_hooks
from simplellm.mixed_precision import widen


class GradientPlace(Protocol):
    """The place for a weight's gradient; `weight.gradient_place`, if it has one."""

    def take(self) -> Tensor | None:
        """Return the tensor to write to, of the weight's shape; then None, until this gradient has been collected."""


class WeightGradients:
    """The treatment of weight gradients by layers that are called inside `applied`.

    In this class, the backward pass adds them to `weight.grad` in the matrix product itself. If the pass raises an
    error, `weight.grad` is undefined, and may be None.
    """

    defers = False  # whether products wait

    def deferred(self, weight: Tensor) -> Callable[[Tensor, Tensor], None] | None:
        """Return a function that defers a product, given the input and the gradient of the output; None: none waits."""
        return None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        global _current
        outer, _current = _current, self
        try:
            yield
        finally:
            _current = outer


_current: WeightGradients | None = None


def current() -> WeightGradients | None:
    """Return the treatment of the weight's gradient by a layer that is called now; None for autograd's."""
    return _current


def is_by_hand(weight: Tensor) -> bool:
    """Return whether a layer that is called now has to compute its weight's gradient with `gradient_of`."""
    is_wanted = _current is not None or _place_of(weight) is not None
    return is_wanted and weight.requires_grad and weight.is_leaf


def gradient_of(weight: Tensor, x: Tensor, grad: Tensor, in_place: bool = True) -> Tensor:
    """Return the gradient (outputs, inputs) for a backward pass to return for the weight of a linear layer.

    With `in_place`, the result is in its final place: it is the sum with `weight.grad`, which becomes None, so that
    autograd takes the sum for the first gradient and keeps it as it is; or it is in the weight's place. Exceptions: the
    product is rounded to bfloat16 before it is added, or hooks of the weight must see this gradient alone.

    Args:
        x: the layer's input (..., inputs).
        grad: its output's gradient (..., outputs).
    """
    x, grad = widen(x).reshape(-1, x.shape[-1]), widen(grad).reshape(-1, grad.shape[-1]).T
    if not in_place or x.dtype != weight.grad_dtype or has_hooks(weight):
        return (grad @ x).float()
    total, place = weight.grad, _place_of(weight)
    # Taken also for a sum, so that a second use of the weight does not overwrite it.
    free = place.take() if place is not None else None
    if total is not None:
        weight.grad = None
        return total.addmm_(grad, x).detach()
    return grad @ x if free is None else torch.mm(grad, x, out=free).detach()


def _place_of(weight: Tensor) -> GradientPlace | None:
    return getattr(weight, "gradient_place", None)
