"""The optimizers that `--optimizer` names, built so that a run starts quickly and a step is one pass."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

KINDS: dict[str, type[Optimizer]] = {"adam": Adam, "adamw": AdamW, "sgd": SGD}


def build_optimizer(name: str, parameters: Iterable[Tensor], lr: float) -> Optimizer:
    """One of `KINDS`, with torch's defaults and one fused update instead of a pass for each operation."""
    return _without_compiler(KINDS[name])(parameters, lr=lr, fused=True)  # type: ignore[call-arg]


def _without_compiler(kind: type[Optimizer]) -> type[Optimizer]:
    """`kind` without the import of torch's compiler, which takes longer than the first training steps.

    torch imports it at an optimizer's first use, only to exempt the optimizer from compilation. So the methods are
    marked as exempt already, and `step` is the plain one under `no_grad`. Where a release of torch does this in
    another way, the import happens and nothing else changes.
    """
    for method in (Optimizer.add_param_group, Optimizer.zero_grad):
        plain = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dict__.setdefault("__dynamo_disable", plain)
    plain_step = getattr(kind.step, "__wrapped__", None)
    return kind if plain_step is None else type(kind.__name__, (kind,), {"step": torch.no_grad()(plain_step)})
