"""Ranks that share sequences, in bfloat16."""

from pathlib import Path

import pytest
from support.chapters import OneProcess, train_on

SCRIPT = "hybrid/intro_5d.py"
MODEL = "--lr 0.3 --dmodel 48 --num-heads 12 --num-kv-heads 6 --n-layers 4 --seq-len 25".split()


def test_mixed_precision(one_process: OneProcess, tmp_path: Path) -> None:
    """Merged in float32, the parts round like the whole."""
    flags = [*MODEL, *"--dtype bfloat16 --batch-size 4".split()]
    layout = "--dp 1 --pp 1 --cp 3 --micro-batches 1".split()
    *_, expected = one_process(4, *flags[:-2])
    *_, own_losses = train_on(3, SCRIPT, tmp_path, *flags, *layout)
    assert own_losses == pytest.approx(expected, rel=1e-3)
    assert own_losses != one_process(4, *MODEL)[2], "computed in bfloat16"
