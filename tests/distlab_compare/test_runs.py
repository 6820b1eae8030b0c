"""Two recorded runs, of tensors that are written by hand."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from distlab.run.recording import file_of
from distlab_compare.command import Run
from distlab_compare.records import Records
from distlab_compare.runs import Pair
from simplellm.errors import InputError

SHAPE = 4, 2  # of the weight; two ranks hold two rows each


def record(run: Path, rank: int, tensors: dict[str, Tensor], start: int = 0, rows: int = SHAPE[0]) -> None:
    """Write a rank's rows of some tensors, as in step 0."""
    path, own = file_of(run, 0, rank), slice(start, start + rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = dict.fromkeys(tensors, (SHAPE, [([start, 0], [rows, SHAPE[1]])]))
    kept = {name: tensor[own].flatten().clone() for name, tensor in tensors.items()}
    save_file(kept, path, metadata={"parts": json.dumps(parts)})


def test_replicas_that_hold_the_same_slices_agree_although_slices_differ(tmp_path: Path) -> None:
    """All replicas update with replica 0's gradient: that is not each replica's own."""
    shares = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    for rank in range(4):  # two replicas of two slices
        record(tmp_path / "run", rank, {"gradient.weight": shares[0]}, start=2 * (rank % 2), rows=2)
    kept = {f"share.{replica}.weight": share / 2 for replica, share in enumerate(shares)}
    record(tmp_path / "one", 0, {"gradient.weight": shares.mean(0), **kept})
    run = Records(tmp_path / "run", {"layout": {"dp": 2, "tp": 2}, "world_size": 4})
    one = Records(tmp_path / "one", {"layout": {}, "world_size": 1})
    parting = Pair(run, one, tolerance=1e-4).first_parting()
    assert parting is not None
    told = "step 0: the gradient of weight on all ranks looks as if rank 1's share was lost; the others count 2 times"
    assert parting.sentences[0].startswith(told)


def test_another_shape_is_told(tmp_path: Path) -> None:
    record(tmp_path / "one", 0, {"gradient.weight": torch.ones(SHAPE)})
    path = file_of(tmp_path / "run", 0, 0)
    path.parent.mkdir(parents=True)
    save_file(
        {"gradient.weight": torch.ones(3)},
        path,
        metadata={"parts": json.dumps({"gradient.weight": ([3], [([0], [3])])})},
    )
    run, one = (Records(tmp_path / name, {"layout": {}, "world_size": 1}) for name in ("run", "one"))
    parting = Pair(run, one, tolerance=1e-4).first_parting()
    assert parting is not None
    assert parting.sentences == ["step 0: the gradient of weight on rank 0 is (3,), and should be (4, 2)"]


def test_metrics_that_are_not_text_are_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"settings": {}, "layout": {}, "world_size": 1}')
    (tmp_path / "metrics.jsonl").write_bytes(b"\x80\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl: these are not the metrics of a run"):
        _ = Run(tmp_path).losses
