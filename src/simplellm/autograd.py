"""What the lab uses of torch's autograd without a public interface for it."""

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


def accumulates(node: Node | None) -> bool:
    """Whether the running backward pass adds to a leaf's `grad`, given the leaf's node (of `ctx.next_functions`).

    It does not if the gradients are returned by `torch.autograd.grad`, or if the leaf is not among its `inputs`.
    """
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad, for this leaf
        return False
