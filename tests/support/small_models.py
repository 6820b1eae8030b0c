"""Small models for the tests of what happens to a model after training, and the commands that they are given to."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distlab.checkpoints.models import SavedModel
from simplellm import command_line
from simplellm.llama import CausalLLama, LLama
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

SIZES: dict[str, Any] = {
    "vocab_size": SPTokenizer().vocab_size,
    "dmodel": 32,
    "num_heads": 4,
    "num_kv_heads": 4,
    "hidden_dim": 128,
    "n_layers": 2,
    "ctx_size": 64,
    "rope_theta": 1e4,
    "norm_eps": 1e-6,
    "padding_idx": 3,
}


@torch.no_grad()
def enliven(model: nn.Module) -> None:
    """Weights as after training: fresh ones give almost uniform predictions and gains of one, which hide mistakes."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
        else:
            parameter.mul_(8)


def saved_model(**options: Any) -> SavedModel:
    options = {**SIZES, **options}
    model = LLama(CausalLLama, **options, seed=4)
    enliven(model)
    return SavedModel(options, {name: p.detach() for name, p in model.named_parameters()}, SHIPPED_MODEL)


def status_of(monkeypatch: pytest.MonkeyPatch, work: Callable[[Any], None], request: type, *flags: object) -> int:
    """The exit status of a command that runs in the tests' own process."""
    monkeypatch.setattr(sys, "argv", ["command", *map(str, flags)])
    with pytest.raises(SystemExit) as end:
        command_line.run(work, request, None)
    assert isinstance(end.value.code, int)
    return end.value.code
