"""Observers of the tensors that autograd keeps, and features of it that the lab uses without a public interface."""

from typing import Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


class Observer(Protocol):
    """Counts activations. A method's result is held for as long as the tensor is, or would be, in memory."""

    def keep(self, tensor: Tensor) -> object:
        """Count a tensor that would also be kept without recomputation."""

    def keep_again(self, tensor: Tensor) -> object:
        """Count a tensor that is kept because of recomputation: an input, or a tensor that has been computed again."""

    def leave_out(self, tensor: Tensor) -> object:
        """Count a tensor that is not kept but would be without recomputation."""


observers: list[Observer] = []  # the observers that count now


def backward(output: Tensor | GradientEdge, gradient: Tensor) -> None:
    """Run `torch.autograd.backward([output], [gradient])` for a gradient of the output's shape and data type.

    torch's own function imports `torch.fx.experimental.symbolic_shapes`, and with it sympy and the compiler, only to
    compare the two shapes. That takes longer than the first training steps.
    """
    # keep_graph, create_graph, inputs, as torch's function passes them on
    _engine_run_backward((output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
