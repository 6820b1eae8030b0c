"""Small models for pipelines, their data, and the comparison with one process."""

from functools import partial

import torch
from torch import Tensor, nn

from simplellm.losses import causalLLMLoss

VOCAB, WIDTH, SEQ = 11, 16, 6
LOSS = partial(causalLLMLoss, vocab_size=VOCAB)
OPTIONS = {"dmodel": WIDTH, "num_heads": 2, "ctx_size": SEQ, "seed": 3}
LEARNING_RATE = 0.1


def batch(step: int, rows: int = 8) -> Tensor:
    return torch.randint(VOCAB, (rows, SEQ), generator=torch.Generator().manual_seed(step))


def louder(net: nn.Module) -> nn.Module:
    """Weights five times larger, for gradients that no tolerance hides."""
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return net


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@torch.no_grad()
def update(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.sub_(LEARNING_RATE * grad_of(parameter))


def assert_near(own: Tensor, expected: Tensor | None, name: str) -> None:
    """Equal to a millionth of the largest element, or of 1 where that is larger."""
    assert expected is not None
    difference = (own - expected).abs().max().item()
    assert difference <= 1e-6 * max(1.0, expected.abs().max().item()), f"{name}: {difference}"
