"""Figures of runs: losses, timelines, memory, and the layout of a hybrid."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.processes import run

from distlab.comm.recorder import COMPUTE, STEP, Event
from distlab.pipeline.schedules import all_stages
from distlab.reports.diagrams import layout, topologies
from distlab.reports.figures import (
    collectives,
    holdings,
    losses,
    memory,
    moving_average,
    places,
    read_metrics,
    timelines,
)
from distlab.reports.memory import KINDS
from distlab.reports.trace import RankTrace, Trace, write_chrome
from simplellm.errors import InputError


def record(run_folder: Path, values: Sequence[float | None]) -> Path:
    run_folder.mkdir()
    lines = (json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(values))
    (run_folder / "metrics.jsonl").write_text("\n".join(lines))
    return run_folder


def test_draws_a_png_that_depends_on_the_runs(tmp_path: Path) -> None:
    falling = record(tmp_path / "a", [4.0, 3.0, 2.0])
    flat = record(tmp_path / "b", [4.0, 4.0, 4.0])
    pictures = []
    for name, runs in {"both": [f"a={falling}", f"b={flat}"], "one": [f"a={falling}"]}.items():
        losses(tmp_path / f"{name}.png", runs)
        pictures.append((tmp_path / f"{name}.png").read_bytes())
        assert pictures[-1].startswith(b"\x89PNG")
    assert pictures[0] != pictures[1]


def test_curves_run_over_steps_tokens_or_seconds(tmp_path: Path) -> None:
    """From where the run began, which may be a checkpoint, and with the validation loss where there is one."""
    keys = ("step", "loss", "tokens", "seconds")
    rows: list[dict[str, object]] = [
        dict(zip(keys, row, strict=True)) for row in ((20, 4.0, 900, 0.5), (21, 3.0, 1000, 0.25), (22, None, 1100, 1))
    ]
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    records = read_metrics(run_folder)
    assert [record["loss"] for record in records[:2]] == [4.0, 3.0]
    assert math.isnan(records[2]["loss"])
    assert places(records, "steps", run_folder) == [21, 22, 23]
    assert places(records, "tokens", run_folder) == [900, 1000, 1100]
    assert places(records, "seconds", run_folder) == [0.5, 0.75, 1.75]
    pictures = set()
    for against in ("steps", "tokens", "seconds"):
        losses(tmp_path / "a.png", [str(run_folder)], against=against)
        pictures.add((tmp_path / "a.png").read_bytes())
    for row, lr in zip(rows, (0.1, 0.2, 0.1), strict=True):
        row["lr"] = lr
    (run_folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    losses(tmp_path / "a.png", [str(run_folder)], of="lr")
    pictures.add((tmp_path / "a.png").read_bytes())
    assert len(pictures) == 4
    with pytest.raises(
        InputError, match="its records have no grad_norm, which --of asks for; the run needs --clip-norm"
    ):
        losses(tmp_path / "a.png", [str(run_folder)], of="grad_norm")
    rows[1]["validation_loss"] = 3.5
    (run_folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    losses(tmp_path / "a.png", [str(run_folder)])
    pictures.add((tmp_path / "a.png").read_bytes())
    assert len(pictures) == 5
    rows[0]["validation_loss"] = None  # as that of a run that has diverged
    (run_folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert math.isnan(read_metrics(run_folder)[0]["validation_loss"])
    losses(tmp_path / "a.png", [str(run_folder)])
    for no_number in ("low", [1.0]):
        rows[0]["validation_loss"] = no_number
        (run_folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        with pytest.raises(InputError, match="these are not the metrics of a run"):
            losses(tmp_path / "a.png", [str(run_folder)])
    with pytest.raises(InputError, match="its records have no tokens, which --against asks for"):
        losses(tmp_path / "a.png", [str(record(tmp_path / "b", [1.0]))], against="tokens")


def test_figures_of_traces_and_of_the_layout(tmp_path: Path) -> None:
    ranks = [
        RankTrace(
            [
                Event(STEP, "step 0", 0, 4),
                Event(COMPUTE, "F0", stage, stage + 1),
                Event(COMPUTE, "B0", 3 - stage, 4 - stage),
            ],
            [(stage + 1, 100), (4 - stage, 0)],
        )
        for stage in (0, 1)
    ]
    write_chrome(Trace(ranks, 1, 2, all_stages("gpipe", 2, 1)), tmp_path / "trace.json")
    timelines(tmp_path / "a.png", [f"run={tmp_path}"])
    memory(tmp_path / "b.png", [f"run={tmp_path / 'trace.json'}"])
    layout(tmp_path / "c.png", dp=2, pp=2)
    pictures = {(tmp_path / name).read_bytes() for name in ("a.png", "b.png", "c.png")}
    assert len(pictures) == 3
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    with pytest.raises(InputError, match="this is not the trace of a run; --trace records one"):
        memory(tmp_path / "d.png", [f"run={tmp_path / 'nothing'}"])
    ranks[0].kept_bytes.clear()
    write_chrome(Trace(ranks[:1], 1, 1, None), tmp_path / "alone.json")
    with pytest.raises(InputError, match="these traces have no stages"):
        memory(tmp_path / "d.png", [f"run={tmp_path / 'alone.json'}"])


def test_losses_that_were_not_reported_leave_no_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr("distlab.reports.style.save", lambda figure, _: drawn.append(figure))
    some = record(tmp_path / "some", [4.0, None, 3.0, None, 2.0])
    losses(tmp_path / "a.png", [str(some)], smooth=2)
    [curve] = drawn[0].axes[0].lines
    assert [list(curve.get_xdata()), list(curve.get_ydata())] == [[1, 3, 5], [4.0, 3.5, 2.5]]
    with pytest.raises(InputError, match="none of its steps has a loss"):
        losses(tmp_path / "a.png", [str(record(tmp_path / "none", [None]))])


def test_runs_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr("distlab.reports.style.save", lambda figure, _: drawn.append(figure))
    folders = [tmp_path / "a" / "lr=1", tmp_path / "b" / "lr=1", tmp_path / "c"]
    for index, folder in enumerate(folders):
        folder.mkdir(parents=True)
        counts = [dict.fromkeys(KINDS, (index + 1) * 10**6)]
        (folder / "memory.json").write_text(json.dumps(counts))
    holdings(tmp_path / "a.png", [str(folder) for folder in folders])
    labels = [label.get_text() for label in drawn[0].axes[0].get_xticklabels()]
    assert labels == [str(folders[0]), str(folders[1]), "c"]
    for figure in (losses, holdings, timelines, memory):
        with pytest.raises(InputError, match="give one or more runs"):
            figure(tmp_path / "a.png", [])


def test_topologies_are_drawn_from_a_simulated_world(tmp_path: Path) -> None:
    topologies(tmp_path / "five.png", world_size=5)
    topologies(tmp_path / "two.png", world_size=2)
    assert (tmp_path / "five.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "five.png").read_bytes() != (tmp_path / "two.png").read_bytes()
    with pytest.raises(InputError, match="--world-size 1: give 2 to 32 ranks"):
        topologies(tmp_path / "one.png", world_size=1)
    with pytest.raises(InputError, match="there is no table of collectives"):
        collectives(tmp_path / "none.png", tmp_path)


def test_moving_average() -> None:
    assert moving_average([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert moving_average([1.0, 3.0], 5) == [1.0, 2.0]


def test_a_folder_that_holds_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file; give NAME=RUN with a run's folder"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{not json")
    ended = run(sys.executable, "-m", "distlab.figures", "losses", tmp_path / "x.png", f"a={tmp_path}")
    assert ended.status == 2
    assert "these are not the metrics of a run" in ended.err
    assert "Traceback" not in ended.err
