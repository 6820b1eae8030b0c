"""What the lab uses of torch's autograd without a public interface for it."""

from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward


def backward(output: Tensor | GradientEdge, gradient: Tensor) -> None:
    """`torch.autograd.backward([output], [gradient])` for a gradient of the output's shape and data type.

    torch's own function imports `torch.fx.experimental.symbolic_shapes`, and with it sympy and the compiler, only to
    compare the two shapes. That takes longer than the first training steps.
    """
    # keep_graph, create_graph, inputs, as torch's function passes them on
    _engine_run_backward((output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def has_hooks(tensor: Tensor) -> bool:
    """Whether functions are registered that get the tensor's gradient before it is accumulated (`register_hook`)."""
    return bool(tensor._backward_hooks)


def use_of_gradient(node: Node | None) -> Literal["accumulated", "returned", "none"]:
    """What the running backward pass does with the gradient of a leaf, given its node (of `ctx.next_functions`).

    It adds it to the leaf's `grad`; or `torch.autograd.grad` returns it; or the leaf is not among the `inputs`.
    """
    try:
        return "accumulated" if node is not None and torch._C._will_engine_execute_node(node) else "none"
    except RuntimeError:  # torch.autograd.grad, for this leaf
        return "returned"
