"""Gradients of weights that are computed later than in the backward pass.

Other pipeline stages wait for the gradients of activations; no stage waits for the gradients of weights before the end
of the step (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, §2).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from simplellm.weight_gradients import WeightGradients, gradient_of

# (a weight, its layer's input, the gradient of the layer's output) -> the weight's gradient, for autograd to accumulate
# The content of `weight.grad` may become part of it.
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class DeferredWeightGradients(WeightGradients):
    """The weight gradients that a backward pass has deferred, in its order.

    Args:
        keep: called with each tensor that is kept for a product; its result is held for as long as the tensor is kept.
    """

    defers = True

    def __init__(self, keep: Callable[[Tensor], object] = lambda _: None) -> None:
        self._keep = keep
        # By weight, the factors of its products; several if layers share the weight: together they give one gradient.
        self._factors: dict[Tensor, list[tuple[Product, Tensor, Tensor, object]]] = {}

    def deferred(self, weight: Tensor) -> Callable[[Tensor, Tensor], None]:
        return partial(self.add, weight, gradient_of)

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
