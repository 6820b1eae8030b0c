"""Averaging gradients with compression: exact where nothing is left out, and it learns where something is."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.chapters import OneProcess, assert_equal, records, train_on
from torch import Tensor

from distlab.checkpoints.models import read_model
from distlab.parallel.gradient_compression import Compressor
from distlab_compare.saved import by_step, first_divergence

SCRIPT = "DP/buckets/intro_DP_buckets.py"


def test_the_largest_values_are_all_values_with_a_share_of_one(one_process: OneProcess, tmp_path: Path) -> None:
    expected_parameters, _, expected_losses = one_process(6)
    flags = "--world-size 2 --batch-size 3 --compress topk --topk-share 1".split()
    parameters, _, losses = train_on(2, SCRIPT, tmp_path, *flags)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_equal(parameters[1], expected_parameters)
    left_out = sum(weight.nbytes for weight in parameters[0].values())  # kept, of every weight; SGD keeps nothing
    memory = json.loads((tmp_path / "memory.json").read_text())
    assert [rank["optimizer state"] for rank in memory] == [left_out, left_out]


def test_powersgd_sends_little_and_learns(tmp_path: Path) -> None:
    flags = "--world-size 2 --batch-size 3 --compress powersgd --powersgd-rank 2 --steps 12".split()
    parameters, _, losses = train_on(2, SCRIPT, tmp_path, *flags)
    assert_equal(parameters[1], parameters[0])
    assert losses[-1] < losses[0] - 0.05
    record = records(tmp_path)[-1]
    whole = sum(weight.nbytes for weight in parameters[0].values())
    thin = sum(2 * 4 * sum(w.shape) if w.dim() > 1 else w.nbytes for w in parameters[0].values())
    assert record["sent_bytes"]["gradients"] == thin < whole / 10


@pytest.mark.parametrize("compress", ["powersgd --powersgd-rank 2", "topk --topk-share 0.1"])
def test_what_was_left_out_is_in_the_checkpoint(compress: str, tmp_path: Path) -> None:
    flags = "--world-size 2 --batch-size 3 --steps 6".split()
    saving = ["--compress", *compress.split(), "--save-every", "3"]
    expected, _, losses = train_on(2, SCRIPT, tmp_path / "run", *flags, *saving)
    resume = ["--resume", str(tmp_path / "run" / "checkpoints" / "step-00000003")]
    parameters, _, rest = train_on(2, SCRIPT, tmp_path / "again", *flags, *resume, "--save-every", "3")
    assert rest == losses[3:]
    files = "checkpoints/step-00000006/*.safetensors"
    saved, again = (
        {name: tensor for file in (tmp_path / run).glob(files) for name, tensor in load_file(file).items()}
        for run in ("run", "again")
    )
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    model = read_model(tmp_path / "run").build().state_dict()
    assert any(name.endswith(".error") for name in saved.keys() - model.keys())
    for own, others in zip(parameters, expected, strict=True):
        assert all(torch.equal(own[name], others[name]) for name in others)

    without = [*resume, "--compress", "none", "--save-every", "6"]  # differs, so what was left out does matter
    _, _, others_rest = train_on(2, SCRIPT, tmp_path / "without", *flags, *without)
    assert others_rest[0] == losses[3]
    assert others_rest[1:] != losses[4:]
    left, right = ({6: by_step(tmp_path / name)[6]} for name in ("without", "run"))
    [sentence] = first_divergence(left, right, [6], 1e-6)
    assert "the weights" in sentence


def test_what_was_left_out_otherwise_is_not_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ranks of another layout, or of matrices of another width."""
    flags = "--compress powersgd --powersgd-rank 2 --steps 2".split()
    train_on(2, SCRIPT, tmp_path / "run", *flags, *"--world-size 2 --batch-size 3 --save-every 1".split())

    def load_state(_: Compressor, state: Mapping[str, Tensor]) -> None:
        assert not state

    monkeypatch.setattr(Compressor, "load_state", load_state)
    resume = ["--resume", str(tmp_path / "run" / "checkpoints" / "step-00000001")]
    train_on(1, SCRIPT, tmp_path / "again", *flags, *resume, *"--world-size 1 --batch-size 6".split())
    flags += "--powersgd-rank 3 --world-size 2 --batch-size 3".split()
    train_on(2, SCRIPT, tmp_path / "wider", *flags, *resume)
