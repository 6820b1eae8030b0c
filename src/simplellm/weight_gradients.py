"""A backward pass in two parts: first the gradients of activations, later those of the weights of linear layers.

Other pipeline stages wait for the former; no stage waits for the latter before the end of the step (Qi et al., "Zero
Bubble Pipeline Parallelism", arXiv 2401.10241, §2).
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from simplellm.autograd import backward

Product = Callable[[Tensor, Tensor], Tensor]  # (a layer's input, its output's gradient) -> its weight's gradient


class WeightGradients:
    """The weight gradients that a backward pass has deferred, in its order.

    Args:
        keep: called with each tensor that is kept for a product; its result is held as long as the tensor is kept.
    """

    def __init__(self, keep: Callable[[Tensor], object] = lambda _: None) -> None:
        self._keep = keep
        # By weight, the factors of its products; more than one if layers share the weight: they give one gradient.
        self._factors: dict[Tensor, list[tuple[Product, Tensor, Tensor, object]]] = {}

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Layers called inside defer their weight gradients to this object in the backward pass."""
        global _deferred_to
        outer, _deferred_to = _deferred_to, self
        try:
            yield
        finally:
            _deferred_to = outer

    def add(self, weight: Tensor, product: Product, x: Tensor, grad: Tensor) -> None:
        """Defer a product; called by a layer's backward pass."""
        self._factors.setdefault(weight, []).append((product, x, grad, (self._keep(x), self._keep(grad))))

    def compute(self) -> None:
        """Compute all gradients, in order, add them to `weight.grad`, and release their factors."""
        while self._factors:
            weight = next(iter(self._factors))
            gradients = [product(x, grad) for product, x, grad, _ in self._factors.pop(weight)]
            backward(weight, torch.stack(gradients).sum(0) if gradients[1:] else gradients[0])


_deferred_to: WeightGradients | None = None


def deferred_to() -> WeightGradients | None:
    """Where a layer that is called now defers its weight gradient; None if its backward pass computes it."""
    return _deferred_to
