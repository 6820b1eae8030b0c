"""The gradients of linear layers' weights: where they are written, and when they are computed.

Autograd computes a weight's gradient as a separate tensor, and then adds it to `weight.grad` or copies it to the buffer
from which it is sent. Here the matrix product itself writes to that place, or adds to its content, which saves a pass
over the memory of all weights for each micro-batch (in Megatron-LM: "gradient accumulation fusion").

The product can also wait: other pipeline stages wait for the gradients of activations, but no stage waits for the
gradients of weights before the end of the step (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, §2).
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from simplellm.autograd import has_hooks
from simplellm.mixed_precision import widen

# (a weight, its layer's input, the gradient of the layer's output) -> the weight's gradient, for autograd to accumulate
# The content of `weight.grad` may become part of it.
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class GradientPlace(Protocol):
    """The place for a weight's gradient; `weight.gradient_place`, if it has one."""

    def take(self) -> Tensor | None:
        """Return the tensor to write to, of the weight's shape; then None, until this gradient has been collected."""


class WeightGradients:
    """The treatment of weight gradients by layers that are called inside `applied`.

    In this class, the backward pass adds them to `weight.grad` in the matrix product itself. If the pass raises an
    error, `weight.grad` is undefined, and may be None.
    """

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        global _current
        outer, _current = _current, self
        try:
            yield
        finally:
            _current = outer


class DeferredWeightGradients(WeightGradients):
    """The weight gradients that a backward pass has deferred, in its order.

    Args:
        keep: called with each tensor that is kept for a product; its result is held for as long as the tensor is kept.
    """

    def __init__(self, keep: Callable[[Tensor], object] = lambda _: None) -> None:
        self._keep = keep
        # By weight, the factors of its products; several if layers share the weight: together they give one gradient.
        self._factors: dict[Tensor, list[tuple[Product, Tensor, Tensor, object]]] = {}

    def add(self, weight: Tensor, product: Product, x: Tensor, grad: Tensor) -> None:
        """Defer a product; called by a layer's backward pass."""
        self._factors.setdefault(weight, []).append((product, x, grad, (self._keep(x), self._keep(grad))))

    def compute(self) -> None:
        """Compute all gradients, in order, add them to `weight.grad`, and release their factors."""
        while self._factors:
            weight = next(iter(self._factors))
            with torch.enable_grad():
                start = _Accumulated.apply(weight, partial(self._gradient, weight))
            start.backward()

    def _gradient(self, weight: Tensor) -> Tensor:
        first, *others = (product(weight, x, grad) for product, x, grad, _ in self._factors.pop(weight))
        return sum(others, first)


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


class _Accumulated(torch.autograd.Function):
    """The start of a backward pass that gives a weight the gradient from a function, and runs its hooks."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient(), None
