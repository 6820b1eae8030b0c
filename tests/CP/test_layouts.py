"""Ranks that share sequences beside replicas, stages and slices: still the training run of one process."""

from pathlib import Path

import pytest
from support.chapters import OneProcess, assert_equal, merged, train_on

SCRIPT = "hybrid/intro_5d.py"
MODEL = "--lr 0.3 --dmodel 48 --num-heads 12 --num-kv-heads 6 --n-layers 4 --seq-len 25".split()
DOCUMENTS = "--seq-len 99 --lr 0.6 --document-mask".split()
ROUNDING = 4e-6  # relative: sums over ranks are added up in another order


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("--dp 1 --pp 2 --cp 2", "--schedule gpipe --transport gloo"),
        ("--dp 1 --pp 2 --cp 2", "--schedule dapple --recompute all --trace"),
        ("--dp 1 --pp 2 --cp 2", "--schedule interleaved --cp-kind gather"),
        ("--dp 1 --pp 2 --cp 2", "--schedule zb-h1 --run-on"),
        ("--dp 1 --pp 2 --cp 3", "--schedule zb-v"),
        ("--dp 2 --pp 1 --cp 2", "--shard gradients --clip-norm 1.2"),
        ("--dp 1 --pp 1 --cp 2", "--shard weights --cp-kind heads"),
        ("--dp 2 --pp 2 --cp 1", "--document-mask"),
        ("--dp 1 --pp 2 --cp 2", "--document-mask --neighbors replicas"),
    ],
)
def test_is_the_run_of_one_process(layout: str, flags: str, one_process: OneProcess, tmp_path: Path) -> None:
    model = [*MODEL, *(DOCUMENTS if "mask" in flags else [])]
    if "clip" in flags:
        model += ["--lr", "0.6", "--clip-norm", "1.2"]
    expected_parameters, expected_gradients, expected_losses = one_process(4, *model)
    sizes = [int(size) for size in layout.split()[1::2]]
    ranks, batch = sizes[0] * sizes[1] * sizes[2], 4 // sizes[0]
    shape = [*layout.split(), "--batch-size", str(batch), "--micro-batches", "2"]
    parameters, gradients, own_losses = train_on(ranks, SCRIPT, tmp_path, *model, *shape, *flags.split())
    assert own_losses == pytest.approx(expected_losses, rel=1e-6)
    assert_equal(merged(parameters), expected_parameters, ROUNDING)
    assert_equal(merged(gradients), expected_gradients, ROUNDING)


@pytest.mark.parametrize("layout", ["--dp 1 --pp 1 --cp 2 --tp 2", "--dp 1 --pp 2 --cp 2 --tp 2"])
def test_slices_inside_of_parts(layout: str, one_process: OneProcess, tmp_path: Path) -> None:
    """Each loss follows from the gradients of the steps before it."""
    sizes = [int(size) for size in layout.split()[1::2]]
    ranks, flags = sizes[1] * sizes[2] * sizes[3], "--batch-size 4 --micro-batches 2".split()
    _, _, own_losses = train_on(ranks, SCRIPT, tmp_path, *MODEL, *layout.split(), *flags)
    assert own_losses == pytest.approx(one_process(4, *MODEL)[2], rel=1e-6)


def test_mixed_precision(one_process: OneProcess, tmp_path: Path) -> None:
    """Merged in float32, the parts round like the whole."""
    flags = [*MODEL, *"--dtype bfloat16 --batch-size 4".split()]
    layout = "--dp 1 --pp 1 --cp 3 --micro-batches 1".split()
    *_, expected = one_process(4, *flags[:-2])
    *_, own_losses = train_on(3, SCRIPT, tmp_path, *flags, *layout)
    assert own_losses == pytest.approx(expected, rel=1e-3)
    assert own_losses != one_process(4, *MODEL)[2], "computed in bfloat16"


def test_goes_on_with_other_parts(one_process: OneProcess, tmp_path: Path) -> None:
    shape = [*MODEL, *"--batch-size 4 --micro-batches 2 --dp 1 --pp 2".split()]
    first = train_on(4, SCRIPT, tmp_path / "a", *shape, *"--cp 2 --steps 2 --save-every 2".split())[2]
    more = ["--resume", str(tmp_path / "a"), "--steps", "4"]
    second = train_on(2, SCRIPT, tmp_path / "b", *shape, "--cp", "1", *more)[2]
    assert [*first, *second] == pytest.approx(one_process(4, *MODEL, "--steps", "4")[2], rel=1e-6)
