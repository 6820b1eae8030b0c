"""Initial weights as a function of (seed, parameter's name, full shape).

A pipeline stage, a tensor-parallel shard and the whole model therefore start with equal weights, on every rank and in
any order of construction: no random generator is shared, and the global generators are not used.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

INITIAL_STD = 0.02


def initial_weight(seed: int, name: str, shape: Sequence[int]) -> Tensor:
    """Return the initial value of one parameter: N(0, 0.02) for a matrix, ones for a norm's gain, zeros for a bias.

    Args:
        seed: the run's seed.
        name: the parameter's name in the whole model, e.g. ``model.layers.2.mlp.up_proj.weight``.
        shape: the shape in the whole model; a tensor-parallel rank takes its slice of the result.

    Returns:
        A float32 tensor of that shape on the CPU, the same for every device that the model may run on.
    """
    if len(shape) == 1:
        fill = torch.zeros if name.endswith("bias") else torch.ones
        return fill(*shape, dtype=torch.float32, device="cpu")
    key = f"{seed} {name} {tuple(shape)}".encode()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:8], "big"))
    weight = torch.empty(*shape, dtype=torch.float32, device="cpu")
    return weight.normal_(0.0, INITIAL_STD, generator=generator)


@torch.no_grad()
def initialize(module: nn.Module, seed: int) -> None:
    """Give every parameter of `module` its initial weight; the names in `module` must be the whole model's."""
    for name, parameter in module.named_parameters():
        parameter.copy_(initial_weight(seed, name, parameter.shape))
