"""The optimizers are torch's, without the slow import."""

import sys
from pathlib import Path

import pytest
import torch
from processes import run
from torch import nn

from distlab.run.optimizers import KINDS, build_optimizer

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", sorted(KINDS))
def test_updates_as_torchs_own(name: str) -> None:
    ours, torchs = nn.Linear(5, 3), nn.Linear(5, 3)
    torchs.load_state_dict(ours.state_dict())
    initial = ours.weight.detach().clone()
    optimizers = [build_optimizer(name, ours.parameters(), 0.1), KINDS[name](torchs.parameters(), lr=0.1)]  # type: ignore[call-arg]
    for step in range(3):
        for model, optimizer in zip((ours, torchs), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.arange(5.0) + step).square().sum().backward()
            optimizer.step()
    assert not torch.allclose(ours.weight, initial)
    torch.testing.assert_close(ours.weight, torchs.weight)
    torch.testing.assert_close(ours.bias, torchs.bias)


def test_training_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    program = tmp_path / "steps.py"
    program.write_text(
        "import sys, torch\n"
        "from distlab.run.optimizers import build_optimizer\n"
        "layer = torch.nn.Linear(2, 2)\n"
        "optimizer = build_optimizer('adam', layer.parameters(), 0.1)\n"
        "optimizer.zero_grad()\n"
        "layer(torch.ones(2)).sum().backward()\n"
        "optimizer.step()\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    ended = run(sys.executable, program)
    assert ended.out.strip() == "False", ended.err
