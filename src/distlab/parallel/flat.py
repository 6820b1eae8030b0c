"""A model's gradients, or its weights, side by side in one buffer, so that one message carries them all.

Averaging the gradients over ranks with different parts of the batch gives the gradients of the whole batch. Averaging
the weights every few steps instead is local SGD or federated averaging (McMahan et al., arXiv 1602.05629).
"""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from distlab.axes.grid import Axis, all_ranks
from distlab.axes.placement import holders
from distlab.comm.group import empty
from distlab.parallel.same_model import check_same_model


def flatten_gradients(model: nn.Module, over: Axis | None = None, *, parts: int = 1) -> Tensor:
    """Place a model's gradients side by side in one buffer of zeros, and return it: (elements,).

    Each `parameter.grad` is a view of it, to which the backward passes add. So an operation on the buffer changes all
    gradients: clear them with `zero_()`, since `optimizer.zero_grad()` would replace the views. If possible, the buffer
    is in memory that the ranks along `over` share, by default all ranks. It is padded to divide into `parts`.

    Raises:
        InputError: the ranks' models differ.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    elements, axis = divisible(elements_of(parameters), parts), over or all_ranks("dp")
    check_same_model(model, axis)
    flat = empty(elements, parameters[0].detach(), axis.group)
    for parameter, view in zip(parameters, views_of(flat, parameters), strict=True):
        parameter.grad = view
    return flat


def flatten_weights(model: nn.Module, over: Axis | None = None, *, parts: int = 1) -> Tensor:
    """Move a model's parameters into one buffer, make them views of it, and return it: (elements,).

    An operation on the buffer then changes the parameters, and one message carries them all to the ranks along `over`,
    by default all ranks. The buffer is padded with zeros so that it divides into `parts`.

    Raises:
        ValueError: these ranks hold different parts of a parameter.
        InputError: the ranks have built different models.
    """
    parameters, axis = list(model.parameters()), over or all_ranks("dp")
    if any(holders(parameter, axis) is not axis for parameter in parameters):
        raise ValueError(f"the ranks along {axis} hold different parts of the parameters")
    check_same_model(model, axis)
    flat = empty(divisible(elements_of(parameters), parts), parameters[0].detach(), axis.group)
    for parameter, view in zip(parameters, views_of(flat, parameters), strict=True):
        parameter.data = view.copy_(parameter.detach())
    return flat


class GradientSums:
    """One or several sums of a model's gradients, each for equally many consecutive micro-batches.

    They are the rows of `flat`, (sums, elements), zeros at first. Each `parameter.grad` is a view of a row. If
    possible, the ranks along `over`, by default all ranks, share the memory.

    Raises:
        InputError: the ranks' models differ.
    """

    def __init__(self, model: nn.Module, sums: int, micro_batches: int, over: Axis | None = None) -> None:
        axis = over or all_ranks("dp")
        check_same_model(model, axis)
        self._each, self._used = micro_batches // sums, -1
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        elements = elements_of(self._parameters)
        self.flat = empty(sums * elements, self._parameters[0].detach(), axis.group).view(sums, elements)
        self._views = [views_of(row, self._parameters) for row in self.flat]
        self._use_row(0)

    def use(self, micro_batch: int) -> None:
        """Add the gradients of the next backward passes to the sum that this micro-batch belongs to."""
        self._use_row(micro_batch // self._each)

    def total(self) -> Tensor:
        """Add up the sums in their order; return the result, (elements,), of which each `parameter.grad` is a view."""
        first, *others = self.flat
        for row in others:
            first += row
        self._use_row(0)
        return first

    def _use_row(self, row: int) -> None:
        if row != self._used:
            self._used = row
            for parameter, view in zip(self._parameters, self._views[row], strict=True):
                parameter.grad = view


def elements_of(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in parameters)


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the view of a flat buffer for each of the parameters that lie in it side by side."""
    parts = flat[: elements_of(parameters)].split([p.numel() for p in parameters])
    return [part.view(p.shape) for p, part in zip(parameters, parts, strict=True)]


def divisible(elements: int, parts: int) -> int:
    """Return the smallest multiple of `parts` that is at least `elements`."""
    return -(-elements // parts) * parts
