"""Gradients of linear layers' weights that are computed later than in the backward pass.

Other pipeline stages wait for the gradients of activations; no stage waits for the gradients of weights before the end
of the step (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, §2).
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from simplellm.autograd import backward
from simplellm.mixed_precision import widen

Product = Callable[[Tensor, Tensor], Tensor]  # (a layer's input, the gradient of its output) -> its weight's gradient


class DeferredWeightGradients:
    """The weight gradients that a backward pass has deferred, in its order.

    Args:
        keep: called with each tensor that is kept for a product; its result is held for as long as the tensor is kept.
    """

    def __init__(self, keep: Callable[[Tensor], object] = lambda _: None) -> None:
        self._keep = keep
        # By weight, the factors of its products; several if layers share the weight: together they give one gradient.
        self._factors: dict[Tensor, list[tuple[Product, Tensor, Tensor, object]]] = {}

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, linear layers are called whose backward pass defers the gradients of their weights."""
        global _current
        outer, _current = _current, self
        try:
            yield
        finally:
            _current = outer

    def add(self, weight: Tensor, product: Product, x: Tensor, grad: Tensor) -> None:
        """Defer a product; called by a layer's backward pass."""
        self._factors.setdefault(weight, []).append((product, x, grad, (self._keep(x), self._keep(grad))))

    def compute(self) -> None:
        """Compute all gradients, in order, add them to `weight.grad`, and release their factors."""
        while self._factors:
            weight = next(iter(self._factors))
            first, *others = (product(x, grad) for product, x, grad, _ in self._factors.pop(weight))
            backward(weight, sum(others, first))  # which also runs the weight's hooks


_current: DeferredWeightGradients | None = None


def current() -> DeferredWeightGradients | None:
    """Return where layers that are called now defer the gradients of their weights; None if they do not."""
    return _current


def weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient (outputs, inputs) of a linear layer's weight, in at least float32.

    Args:
        x: the layer's input (..., inputs).
        grad: its output's gradient (..., outputs).
    """
    product = widen(grad).reshape(-1, grad.shape[-1]).T @ widen(x).reshape(-1, x.shape[-1])
    return product.to(torch.promote_types(product.dtype, torch.float32))
