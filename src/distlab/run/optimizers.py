"""The optimizers that `--optimizer` names, built so that a run starts quickly and a step is one pass."""

from collections.abc import Iterable

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from distlab.comm.torch_patches import without_compiler

KINDS: dict[str, type[Optimizer]] = {"adam": Adam, "adamw": AdamW, "sgd": SGD}


def build_optimizer(name: str, parameters: Iterable[Tensor], lr: float) -> Optimizer:
    """One of `KINDS`, with torch's defaults and one fused update instead of a pass for each operation."""
    return without_compiler(KINDS[name])(parameters, lr=lr, fused=True)  # type: ignore[call-arg]
