"""The tolerances of two recorded runs: what counts as rounding, by dtype, by optimizer and by element."""

import json
from pathlib import Path

import pytest
import torch
from support.written_records import ONE_PROCESS, SHAPE, configure, record

from distlab_compare.command import Request, compare
from distlab_compare.records import Recordings
from distlab_compare.runs import Pair


def test_rounding_of_small_elements_is_that_of_their_tensor(tmp_path: Path) -> None:
    """Their rank holds no others; the weights that one of the runs has after the step are not compared."""
    right = torch.ones(SHAPE)
    right[2:] = 1e-6
    record(tmp_path / "one", 0, {"gradient.weight": right})
    for rank in range(2):
        record(tmp_path / "run", rank, {"gradient.weight": right + 1e-5}, start=2 * rank, rows=2)
        record(tmp_path / "run", rank, {"weights.weight": right}, start=2 * rank, rows=2, step=1)
    run = Recordings(tmp_path / "run", {"layout": {"tp": 2}, "world_size": 2})
    one = Recordings(tmp_path / "one", ONE_PROCESS)
    assert Pair(run, one, tolerance=1e-4).first_divergence() is None
    assert Pair(one, run, tolerance=1e-4).first_divergence() is None
    assert Pair(run, one, tolerance=1e-6).first_divergence() is not None


def test_an_element_whose_gradient_was_rounding_once_may_have_any_weight_from_then_on(tmp_path: Path) -> None:
    """With Adam, which makes the first update of any gradient the same size."""
    for name, sign in (("run", 1), ("one", -1)):
        rounding, moved = torch.ones(SHAPE), torch.ones(SHAPE)
        rounding[0, 0], moved[0, 0] = sign * 1e-9, 1 + sign * 0.1
        weights = torch.ones(SHAPE), moved, moved
        for step, gradient in enumerate((rounding, torch.ones(SHAPE))):
            record(tmp_path / name, 0, {"gradient.weight": gradient, "weights.weight": weights[step]}, step=step)
        record(tmp_path / name, 0, {"weights.weight": weights[2]}, step=2)
    run, one = (Recordings(tmp_path / name, ONE_PROCESS) for name in ("run", "one"))
    assert Pair(run, one, tolerance=1e-4, has_moments=True).first_divergence() is None
    divergence = Pair(run, one, tolerance=1e-4).first_divergence()
    assert divergence is not None
    assert divergence.step == 0


def test_a_run_beside_one_in_bfloat16_has_its_tolerance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, rounded, other = (tmp_path / dtype for dtype in ("float32", "bfloat16", "float16"))
    for run, factor in ((plain, 1.0), (rounded, 1.01), (other, 1.01)):
        values = {"first": factor, "middle": 1e-6 * (1.005 - factor), "last": 1.0}  # the second one is rounding
        record(run, 0, {f"gradient.{name}": torch.full(SHAPE, value) for name, value in values.items()})
        configure(run, settings={"dtype": run.name})
        (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "loss": factor}) + "\n")
    for own, right in ((plain, rounded), (rounded, plain), (other, plain)):
        assert compare(Request(own, right)) == 0
        assert "largest relative difference: 0.01 (tolerance 0.02)" in capsys.readouterr().out
    assert compare(Request(plain, rounded, tolerance=1e-3)) == 1


def test_with_adam_or_in_bfloat16_rounding_is_larger_after_the_first_update_and_only_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (0, 1):
        record(tmp_path / "one", 0, {"gradient.weight": torch.ones(SHAPE)}, step=step)
        record(tmp_path / f"run{step}", 0, {"gradient.weight": torch.full(SHAPE, 1 + 5e-4)}, step=step)
        record(tmp_path / f"run{step}", 0, {"gradient.weight": torch.ones(SHAPE)}, step=1 - step)
    first, second, one = (Recordings(tmp_path / name, ONE_PROCESS) for name in ("run0", "run1", "one"))
    divergence = Pair(first, one, tolerance=1e-4, has_moments=True).first_divergence()
    assert divergence is not None
    assert divergence.step == 0
    assert Pair(second, one, tolerance=1e-4, has_moments=True).first_divergence() is None
    assert Pair(second, one, tolerance=1e-4).first_divergence() is not None
    assert Pair(second, one, tolerance=4e-4).first_divergence() is None, "a tolerance larger than that of float32"
    assert Pair(first, one, tolerance=4e-4).first_divergence() is not None
    for optimizer, status in (("adam", 0), ("adamw", 0), ("sgd", 1), (None, 1)):
        for name in ("run1", "one"):
            configure(tmp_path / name, settings={"optimizer": optimizer} if optimizer else {})
        assert compare(Request(tmp_path / "run1", tmp_path / "one")) == status
        told = "difference: 0.0005 (tolerance 0.0001; 0.001 for gradients and weights" in capsys.readouterr().out
        assert told == (status == 0), "a difference above the first tolerance, in runs that are equal"


def test_with_adam_the_weights_after_the_only_step_have_the_larger_tolerance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, after in (("run", 1 + 5e-4), ("one", 1.0)):
        record(tmp_path / name, 0, {"gradient.weight": torch.ones(SHAPE)}, step=0)
        record(tmp_path / name, 0, {"weights.weight": torch.full(SHAPE, after)}, step=1)
        configure(tmp_path / name, settings={"optimizer": "adam"})
    assert compare(Request(tmp_path / "run", tmp_path / "one")) == 0
    assert "difference: 0.0005 (tolerance 0.0001; 0.001 for gradients and weights" in capsys.readouterr().out


def test_a_loss_is_compared_relative_to_itself_and_named_by_replicas_and_micro_batches(tmp_path: Path) -> None:
    for rank in range(3):
        record(tmp_path, rank, {"gradient.weight": torch.ones(SHAPE)})
    run = Recordings(tmp_path, {"layout": {"dp": 3}, "world_size": 3})
    for factor, told in ((1 + 5e-5, ""), (2, "by their number, 2 "), (3, "added up over 3 replicas, not averaged ")):
        losses = {0: 8.0 * factor}, {0: 8.0}
        divergence = Pair(run, run, tolerance=1e-4, losses=losses, micro_batches=2).first_divergence()
        said = divergence.sentences[0] if divergence else ""
        assert (bool(said), told in said) == (bool(told), True), said
    for own, right in (({0: 0.0}, {0: 0.0}), ({}, {0: 8.0}), ({0: 8.0}, {}), ({0: 8 + 4e-5}, {0: 8.0})):
        equal = Pair(run, run, tolerance=1e-6, losses=(own, right)).first_divergence() is None
        assert equal, "also a loss that only one of them has, and losses that differ in their last digits"
