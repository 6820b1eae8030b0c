"""The optimizers that `--optimizer` names."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from distlab.machine.torch_patches import without_compiler

KINDS: dict[str, type[Optimizer]] = {"adam": Adam, "adamw": AdamW, "sgd": SGD}


def build_optimizer(
    name: str,
    parameters: Iterable[Tensor],
    lr: float,
    weight_decay: float | None = None,
    betas: tuple[float, float] | None = None,
) -> Optimizer:
    """Make an optimizer of `KINDS`, with one fused kernel instead of one for each operation if all is contiguous.

    Args:
        weight_decay: applied to matrices only (`is_decayed`); None is torch's default, 0.01 for "adamw", else 0.
            "adamw" shrinks the weights by it ("decoupled": Loshchilov and Hutter, arXiv 1711.05101); the others add it
            to the gradient.
        betas: decay rates of "adam"'s and "adamw"'s moving averages of the gradient and its square; None: torch's.
    """
    kind = without_compiler(KINDS[name])
    options: dict[str, Any] = {} if betas is None else {"betas": betas}
    parameters = list(parameters)
    # On a CPU, torch's fused kernels take any tensor for a contiguous one: they would also update what is in its gaps.
    fused = all(parameter.is_contiguous() for parameter in parameters)
    optimizer = kind(parameters, lr=lr, fused=fused, **options)  # type: ignore[call-arg]
    [group] = optimizer.param_groups
    decay = group["weight_decay"] if weight_decay is None else weight_decay
    group["weight_decay"] = 0.0
    if decay:
        decayed = [parameter for parameter in group["params"] if is_decayed(parameter)]
        group["params"] = [parameter for parameter in group["params"] if not is_decayed(parameter)]
        optimizer.add_param_group({**group, "params": decayed, "weight_decay": decay})
    return optimizer


def is_decayed(parameter: Tensor) -> bool:
    """Return whether weight decay applies to a parameter: yes for matrices, no for biases and the gains of norms."""
    return parameter.dim() >= 2
