"""A backward pass in two parts: gradients of activations at once, those of linear layers' weights later.

Other stages of a pipeline wait for the former; nobody waits for the latter before the end of the step (Qi et al., "Zero
Bubble Pipeline Parallelism", arXiv 2401.10241, §2).
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]  # (a layer's input, its output's gradient) -> its weight's gradient


class WeightGradients:
    """The products for weights that the backward pass of one forward pass leaves out, in its order.

    Args:
        keep: called with each tensor that is kept for a product; what it returns lives as long as that is kept.
    """

    def __init__(self, keep: Callable[[Tensor], object] = lambda _: None) -> None:
        self._keep = keep
        # By weight, the factors of its products: more than one where layers share it, which is to be one gradient.
        self._factors: dict[Tensor, list[tuple[Product, Tensor, Tensor, object]]] = {}

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Have the layers that are called inside leave their products here in the backward pass."""
        global _deferred_to
        outer, _deferred_to = _deferred_to, self
        try:
            yield
        finally:
            _deferred_to = outer

    def add(self, weight: Tensor, product: Product, x: Tensor, grad: Tensor) -> None:
        """Leave a product for later; called by a layer's backward pass."""
        self._factors.setdefault(weight, []).append((product, x, grad, (self._keep(x), self._keep(grad))))

    def compute(self) -> None:
        """Add all gradients to `weight.grad`, first in, first out, and let go of their factors."""
        while self._factors:
            weight = next(iter(self._factors))
            gradients = [product(x, grad) for product, x, grad, _ in self._factors.pop(weight)]
            torch.autograd.backward([weight], [torch.stack(gradients).sum(0) if gradients[1:] else gradients[0]])


_deferred_to: WeightGradients | None = None


def deferred_to() -> WeightGradients | None:
    """Where a layer that is called now leaves its product; None if it is to be part of its backward pass."""
    return _deferred_to
