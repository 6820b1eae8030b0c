"""The loss figure."""

import json
import sys
from pathlib import Path

import pytest
from processes import run

from distlab.figures import LossFigure, draw_losses, moving_average, read_losses
from simplellm.errors import InputError


def record(run_folder: Path, losses: list[float]) -> Path:
    run_folder.mkdir()
    lines = (json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses))
    (run_folder / "metrics.jsonl").write_text("\n".join(lines))
    return run_folder


def test_draws_a_png_that_depends_on_the_runs(tmp_path: Path) -> None:
    falling = record(tmp_path / "a", [4.0, 3.0, 2.0])
    flat = record(tmp_path / "b", [4.0, 4.0, 4.0])
    pictures = []
    for name, runs in {"both": [f"a={falling}", f"b={flat}"], "one": [f"a={falling}"]}.items():
        draw_losses(LossFigure(png=tmp_path / f"{name}.png", runs=runs))
        pictures.append((tmp_path / f"{name}.png").read_bytes())
        assert pictures[-1].startswith(b"\x89PNG")
    assert pictures[0] != pictures[1]


def test_moving_average() -> None:
    assert moving_average([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert moving_average([1.0, 3.0], 5) == [1.0, 2.0]


def test_a_folder_that_holds_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no metrics of a run"):
        read_losses(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{not json")
    ended = run(sys.executable, "-m", "distlab.figures", tmp_path / "x.png", f"a={tmp_path}")
    assert ended.status == 1
    assert "no metrics of a run" in ended.err
    assert "Traceback" not in ended.err
