"""Models in Hugging Face's format: changes of their configuration, and what transformers computes with them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simplellm.stories import story
from simplellm.tokenizers import SPTokenizer


def change_config(folder: Path, **values: Any) -> None:
    """Set keys of config.json; `...` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@torch.no_grad()
def assert_same_logits(ours: nn.Module, theirs: Any, atol: float = 1e-5) -> Tensor:
    """Compare a model of the lab's with one of transformers', on stories; return the logits."""
    ids = torch.tensor([SPTokenizer().encode(story(index))[:60] for index in range(3)])
    expected: Tensor = theirs(ids).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(ids), expected, rtol=1e-5, atol=atol)
    return expected
