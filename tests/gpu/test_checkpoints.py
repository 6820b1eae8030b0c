"""What a run on the GPU has saved goes on: in its own layout, in another one, in another dtype, and on the CPU."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.gpu_runs import DEVICE, NEAR, SAME, launch, train

ADAM = "--optimizer adam --lr 1e-3 --num-kv-heads 2"  # with moments to save, and grouped-query attention
SENTIMENT = "sentiment --samples 128 --epochs 2 --bsz 32 --optimizer sgd --lr 0.1"
DROPOUT = f"{SENTIMENT} --dropout 0.2"


def test_it_goes_on_in_another_layout_and_dtype(tmp_path: Path) -> None:
    saved = train(f"hybrid {ADAM} --dp 1 --pp 2 --tp 2 --batch-size 6 --save-every 3", tmp_path / "before")
    resume = "--resume", saved.checkpoint(3)
    alone = train(f"primer {ADAM} --batch-size 6", tmp_path / "alone", *resume, device="cpu")
    assert alone.losses == pytest.approx(saved.losses[3:], rel=SAME)
    layout = train(f"tp {ADAM} --world-size 2 --batch-size 6", tmp_path / "layout", *resume)
    assert layout.losses == pytest.approx(saved.losses[3:], rel=SAME)
    dtype = train(f"dp-ga {ADAM} --world-size 2 --dtype bfloat16", tmp_path / "dtype", *resume)
    assert dtype.losses == pytest.approx(saved.losses[3:], rel=NEAR)


def test_dropout_is_the_same_on_ranks_that_share_a_layer_and_after_resuming(tmp_path: Path) -> None:
    """Equal losses prove equal masks. After resuming, they do if CUDA's generator was saved and restored."""
    alone = launch(f"{DROPOUT} --world-size 1 --tp 1", tmp_path / "alone").losses
    saved = launch(f"{DROPOUT} --world-size 2 --tp 2 --save-every 3", tmp_path / "saved")
    assert saved.losses == pytest.approx(alone, rel=SAME)
    without = launch(f"{SENTIMENT} --world-size 2 --tp 2", tmp_path / "without").losses
    assert all(abs(loss - other) > 100 * SAME * loss for loss, other in zip(without, alone, strict=True))

    names = [name for file in saved.checkpoint(3).glob("*.safetensors") for name in load_file(file)]
    assert {f"random.{rank}.{DEVICE}" for rank in range(2)} <= set(names)
    resumed = launch(f"{DROPOUT} --world-size 2 --tp 2", tmp_path / "resumed", "--resume", saved.checkpoint(3))
    assert resumed.losses == pytest.approx(alone[3:], rel=SAME)
