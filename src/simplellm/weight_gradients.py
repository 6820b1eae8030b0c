"""The gradients of linear layers' weights: where they are written, and when they are computed.

Autograd computes a weight's gradient as a tensor of its own, and then adds it to `weight.grad` or copies it to where it
is sent from. Here the matrix product itself writes to that place, or adds to what is there, which saves a pass over the
memory of all weights for each micro-batch (in Megatron-LM: "gradient accumulation fusion").

The product can also wait. Other pipeline stages wait for the gradients of activations; no stage waits for those of
weights before the end of the step (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, §2).
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
# What is in `weight.grad` may become part of it.
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class Place(Protocol):
    """Where a weight's gradient is to be; `weight.gradient_place`, if it has one."""

    def take(self) -> Tensor | None:
        """The tensor to write to, of the weight's shape; None from then on, until this gradient has been collected."""


class WeightGradients:
    """How layers that are called inside `applied` treat the gradients of their weights.

    Here: the backward pass adds them to `weight.grad` in the matrix product itself. If the pass raises an error,
    `weight.grad` is undefined, and may be None.
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
        keep: called with each tensor that is kept for a product; its result is held as long as the tensor is kept.
    """

    def __init__(self, keep: Callable[[Tensor], object] = lambda _: None) -> None:
        self._keep = keep
        # By weight, the factors of its products; more than one if layers share the weight: they give one gradient.
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


class _Accumulated(torch.autograd.Function):
    """The start of a backward pass that gives a weight the gradient that a function returns, and runs its hooks."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient(), None


_current: WeightGradients | None = None


def current() -> WeightGradients | None:
    """How a layer that is called now treats the gradient of its weight; None: as autograd does."""
    return _current


def is_by_hand(weight: Tensor) -> bool:
    """Whether a layer that is called now is to compute its weight's gradient with `gradient_of`, now or later."""
    is_wanted = _current is not None or _place_of(weight) is not None
    return is_wanted and weight.requires_grad and weight.is_leaf


def gradient_of(weight: Tensor, x: Tensor, grad: Tensor, in_place: bool = True) -> Tensor:
    """The gradient (outputs, inputs) that a backward pass is to return for the weight of a linear layer.

    With `in_place`, the result is where it belongs: the sum with `weight.grad`, which is then None, so that autograd
    takes the sum for the first gradient and keeps it as it is; or in the weight's place. Not so if the product is
    rounded to bfloat16 before it is added, or if hooks of the weight are to see this gradient alone.

    Args:
        x: the layer's input (..., inputs).
        grad: its output's gradient (..., outputs).
    """
    x, grad = widen(x).reshape(-1, x.shape[-1]), widen(grad).reshape(-1, grad.shape[-1]).T
    if not in_place or x.dtype != weight.dtype or has_hooks(weight):
        return (grad @ x).float()
    total, place = weight.grad, _place_of(weight)
    # Taken also for a sum, so that a second use of the weight does not write over it.
    free = place.take() if place is not None else None
    if total is not None:
        weight.grad = None
        return total.addmm_(grad, x).detach()
    return grad @ x if free is None else torch.mm(grad, x, out=free).detach()


def _place_of(weight: Tensor) -> Place | None:
    return getattr(weight, "gradient_place", None)
