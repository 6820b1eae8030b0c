"""A feature of autograd that the lab uses without a public interface."""

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


def backward(output: Tensor | GradientEdge, gradient: Tensor) -> None:
    """Run `torch.autograd.backward([output], [gradient])` for a gradient of the output's shape and data type.

    torch's own function imports `torch.fx.experimental.symbolic_shapes`, and with it sympy and the compiler, only to
    compare the two shapes. That takes longer than the first training steps.
    """
    # keep_graph, create_graph, inputs, as torch's function passes them on
    _engine_run_backward((output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
