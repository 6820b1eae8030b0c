"""Figures of runs: losses, timelines, memory, and the layout of a hybrid."""

import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from matplotlib.transforms import Bbox
from support.chapters import load
from support.processes import LAB
from support.terminals import fork_python

from distlab.comm.recorder import COMPUTE, PART, STEP, Event
from distlab.pipeline.actions import ActionCosts
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import all_stages
from distlab.reports import style
from distlab.reports.memory import MEMORY_KINDS
from distlab.reports.timeline import draw, planned_panel
from distlab.reports.trace import RankTrace, Trace, write_chrome
from distlab_figures import diagrams
from distlab_figures import runs as figures
from distlab_figures.command import FIGURES, command
from distlab_figures.records import moving_average, read_metrics
from distlab_figures.runs import holdings, losses
from simplellm.errors import InputError


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that a figure is drawn from: metrics, a trace of a pipeline, counts of memory, collectives."""
    folder = tmp_path_factory.mktemp("run")
    more = {"seconds": 1.5, "expert_loads": [[3, 1, 2]]}
    metrics = [{"step": s, "loss": 8 / (1 + s), "tokens": 1536 * (1 + s), **more} for s in range(600)]
    for number, record in enumerate(metrics):
        record.update({"validation_loss": record["loss"]} if number % 100 == 99 else {})
    lines(folder / "metrics.jsonl", metrics)
    programs = all_stages("dapple", 4, 8)
    plan = simulate(programs, ActionCosts(0.03, 0.06))
    ranks = [
        RankTrace(
            [
                Event(STEP, "step 0", 0.0, plan.makespan),
                *(Event(COMPUTE, plan.labels[s.action], s.start, s.end) for s in spans),
                *(
                    Event(PART, f"ring step {step}{pass_}", 0.03, 0.04)
                    for step in (0, 1)
                    for pass_ in ("", ", backward")
                ),
            ],
            [(s.end, 10**6) for s in spans],
        )
        for spans in plan.spans
    ]
    write_chrome(Trace(ranks, {"pp": 4}, programs), folder / "trace.json")
    (folder / "memory.json").write_text(json.dumps([dict.fromkeys(MEMORY_KINDS, 10**7)]))
    columns = itertools.product(
        ("broadcast", "reduce", "all-reduce"), ("naive", "tree", "ring", "library", "shared"), (10**3, 10**7)
    )
    keys = ("operation", "topology", "size_bytes", "measured_seconds", "predicted_seconds")
    lines(
        folder / "collectives.jsonl",
        [dict(zip(keys, (*row, row[-1] / 1e8, row[-1] / 2e8), strict=True)) for row in columns],
    )
    return folder


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def draw_network(png: Path) -> None:
    sys.path.append(str(LAB / "bench"))
    bench = load("bench/network.py")
    names = [layout.name for layout in bench.LAYOUTS]
    bench.draw(png, bench.read(LAB / "bench/network.jsonl", names), names)


def draw_slow_training(png: Path) -> None:
    sys.path.append(str(LAB / "bench"))
    bench = load("bench/slow_training.py")
    bench.draw(png, bench.read(LAB / "bench/slow_training.jsonl"), "10 Mbit/s and 50 ms")


DRAWN: dict[str, Callable[[Path, Path], None]] = {
    "losses": lambda png, run: figures.losses(png, [f"one process={run}", f"three ranks={run}"], against="tokens"),
    "timelines": lambda png, run: figures.timelines(png, [f"GPipe={run}", f"DAPPLE={run}"]),
    "timelines, compact": lambda png, run: figures.timelines(png, [f"DAPPLE={run}", f"again={run}"], compact=True),
    "memory": lambda png, run: figures.memory(png, [f"GPipe={run}", f"DAPPLE={run}"]),
    "holdings": lambda png, run: figures.holdings(png, [f"tp {n}={run}" for n in (1, 2, 3, 6)]),
    "expert_loads": lambda png, run: figures.expert_loads(png, [f"free={run}", f"balanced={run}"]),
    "partings": lambda png, run: figures.partings(png, [f"one={run}", f"ep={run}"]),
    "ring_steps": lambda png, run: figures.ring_steps(png, [f"zigzag={run}", f"contiguous={run}"]),
    "sharding": lambda png, run: figures.sharding(png, [f"{kind}-8={run}" for kind in ("optimizer", "weights")]),
    "schedules": lambda png, run: diagrams.schedules(png, stages=2, micro_batches=2),
    "layout": lambda png, run: diagrams.layout(png),
    "splits": lambda png, run: diagrams.splits(png),
    "replicas": lambda png, run: diagrams.replicas(png, ranks=4),
    "averaging": lambda png, run: diagrams.averaging(png),
    "stages": lambda png, run: diagrams.stages(png, pp=2, layers=6),
    "block": lambda png, run: diagrams.block(png, ranks=len(style.SERIES)),
    "sequence_parts": lambda png, run: diagrams.sequence_parts(png),
    "topologies": lambda png, run: diagrams.topologies(png),
    "collectives": lambda png, run: figures.collectives(png, run),
    "shared_memory": lambda png, run: figures.shared_memory(png, run),
    "show_schedule": lambda png, run: draw(png, [planned_panel("dapple", simulate(all_stages("dapple", 4, 8)))]),
    "network": lambda png, run: draw_network(png),
    "slow_training": lambda png, run: draw_slow_training(png),
}


DIAGRAMS = "layout splits replicas averaging stages block sequence_parts topologies".split()


def test_every_figure_of_the_command_is_drawn_below(
    drawn: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {figure.__name__ for figure in FIGURES} < DRAWN.keys()
    command(["averaging", str(png := tmp_path / "a.png")])
    assert (capsys.readouterr().out, len(drawn)) == (f"# {png}\n", 1)


@pytest.mark.parametrize("name", DRAWN)
def test_each_figure_is_drawn_and_the_parts_of_a_diagram_fill_its_width(
    name: str, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = style.save

    def look_and_save(figure: Any, png: Path) -> None:
        if name in DIAGRAMS:
            figure.canvas.draw()
            for axes in figure.axes:
                texts = [text for text in axes.texts if text.get_text()]
                parts = Bbox.union([part.get_window_extent() for part in (*texts, *axes.patches)])
                assert parts.width > 0.75 * axes.get_window_extent().width
        save(figure, png)

    monkeypatch.setattr(style, "save", look_and_save)
    DRAWN[name](png := tmp_path / "a new folder/in another/a.png", recorded)
    assert png.read_bytes().startswith(b"\x89PNG")


def record(run_folder: Path, values: Sequence[float | None]) -> Path:
    run_folder.mkdir()
    lines(run_folder / "metrics.jsonl", [{"step": step, "loss": loss} for step, loss in enumerate(values)])
    return run_folder


def curves(figure: Any) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines]


def test_curves_run_over_steps_tokens_or_seconds(tmp_path: Path, drawn: list[Any]) -> None:
    """From where the run began, which may be a checkpoint, and with the validation loss where there is one."""
    keys = ("step", "loss", "tokens", "seconds", "lr")
    values = ((20, 4.0, 900, 0.5, 0.1), (21, 3.0, 1000, 0.25, 0.2), (22, None, 1100, 1, 0.1))
    rows = [dict(zip(keys, row, strict=True)) for row in values]
    metrics = tmp_path / "metrics.jsonl"
    lines(metrics, rows)
    records = read_metrics(tmp_path)
    assert [record["loss"] for record in records[:2]] == [4.0, 3.0]
    assert math.isnan(records[2]["loss"])
    against: Any
    for against, where in {"steps": [21, 22], "tokens": [900, 1000], "seconds": [0.5, 0.75]}.items():
        losses(tmp_path / "a.png", [str(tmp_path)], against=against, smooth=1)
        assert curves(drawn[-1]) == [(where, [4.0, 3.0])]
        assert drawn[-1].axes[0].get_ylabel() == "loss of the global batch"
    with pytest.raises(
        InputError, match="its records have no grad_norm, which --of asks for; the run needs --clip-norm"
    ):
        losses(tmp_path / "a.png", [str(tmp_path)], of="grad_norm")
    rows[1]["validation_loss"] = 3.5
    lines(metrics, rows)
    losses(tmp_path / "a.png", [str(tmp_path)])
    assert ([22], [3.5]) in curves(drawn[-1])
    assert drawn[-1].axes[0].get_ylabel() == "loss (mean of 15 steps)"
    assert drawn[-1].axes[0].get_legend().get_texts()[-1].get_text() == "validation"
    losses(tmp_path / "a.png", [str(tmp_path)], of="lr")
    assert curves(drawn[-1]) == [([21, 22, 23], [0.1, 0.2, 0.1])]
    rows[0]["validation_loss"] = None  # as that of a run that has diverged
    lines(metrics, rows)
    assert math.isnan(read_metrics(tmp_path)[0]["validation_loss"])
    losses(tmp_path / "a.png", [str(tmp_path)])
    no_number: Any
    for no_number in ("low", [1.0]):
        rows[0]["validation_loss"] = no_number
        lines(metrics, rows)
        with pytest.raises(InputError, match="these are not the metrics of a run"):
            losses(tmp_path / "a.png", [str(tmp_path)])
    with pytest.raises(InputError, match="its records have no tokens, which --against asks for"):
        losses(tmp_path / "a.png", [str(record(tmp_path / "b", [1.0]))], against="tokens")


def test_the_memory_of_a_step_begins_and_ends_with_it(tmp_path: Path, drawn: list[Any]) -> None:
    steps = [Event(STEP, f"step {step}", step, step + 1.0) for step in range(3)]
    kept = [(step + at, size * 10**6) for step in range(3) for at, size in ((0.25, 2 + step), (0.75, step))]
    replicas = Trace([RankTrace(steps, kept)] * 2, {"dp": 2, "pp": 1}, all_stages("dapple", 1, 1))
    write_chrome(replicas, tmp_path / "trace.json")
    figures.memory(tmp_path / "a.png", [f"run={tmp_path / 'trace.json'}"])
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["stage 0"], "of both"
    (times, sizes), again = curves(drawn[0])
    assert again == (times, sizes)
    assert [round(time) for time in times] == [0, 250, 750]
    assert sizes in ([0, 3, 1], [0, 4, 2]), "of one step that is not the first"


def test_a_line_marks_the_first_token_with_another_route(tmp_path: Path, drawn: list[Any]) -> None:
    one, other = record(tmp_path / "one", [4.0, 2.0, 2.0]), record(tmp_path / "other", [4.0, 2.0, 3.0])
    steps = [
        json.loads(line) | {"other_routes": routes}
        for line, routes in zip((other / "metrics.jsonl").read_text().splitlines(), (0, 2, 3), strict=True)
    ]
    lines(other / "metrics.jsonl", steps)
    figures.partings(tmp_path / "a.png", [str(one), str(other)])
    assert curves(drawn[0])[1] == ([1, 1], [0, 1])
    assert curves(drawn[0])[0][1] == [1e-9, 1e-9, 0.5], "relative"
    lines(one / "metrics.jsonl", [{"step": step, "loss": loss} for step, loss in enumerate((4.0, None, 2.0))])
    lines(other / "metrics.jsonl", steps[1:])  # resumed in another folder, from step 1 on
    figures.partings(tmp_path / "a.png", [str(one), str(other)])
    assert curves(drawn[1]) == [([2], [0.5]), ([1, 1], [0, 1])], "of the steps with two losses"


def test_schedules_on_one_axis_say_what_is_idle_in_the_plan_and_measured(recorded: Path, drawn: list[Any]) -> None:
    figures.timelines(Path("a.png"), [f"DAPPLE={recorded}"], compact=True)
    title = drawn[0].axes[0].get_title(loc="left")
    assert re.fullmatch(r"DAPPLE: idle (\d\d\.\d%) in the plan, \1 measured", title), title


def test_losses_that_were_not_reported_leave_no_gaps(tmp_path: Path, drawn: list[Any]) -> None:
    some = record(tmp_path / "some", [4.0, None, 3.0, None, 2.0])
    losses(tmp_path / "a.png", 9 * [str(some)], smooth=2)
    assert curves(drawn[0]) == 9 * [([1, 3, 5], [4.0, 3.5, 2.5])], "also of more runs than there are colors"
    widths = [line.get_linewidth() for line in drawn[0].axes[0].lines]
    assert widths[0] > widths[1] > widths[2] >= widths[3] > 1, "curves that coincide are all visible"
    with pytest.raises(InputError, match="none of its steps has a loss"):
        losses(tmp_path / "a.png", [str(record(tmp_path / "none", [None]))])


def by_name(figure: Any) -> dict[str, Any]:
    """The solid curve of the first axes that has the color of each name in the legend."""
    [shown] = figure.legends
    entries = zip(shown.get_texts(), shown.legend_handles, strict=True)
    names = {handle.get_color(): text.get_text() for text, handle in entries}
    solid = [line for line in figure.axes[0].lines if line.get_linestyle() != ":" and len(line.get_xdata()) > 1]
    return {names[line.get_color()]: line for line in solid}


def test_the_curves_of_a_collective_are_its_own(recorded: Path, drawn: list[Any], tmp_path: Path) -> None:
    """Measured seconds differ by topology, and predictions are half of them."""
    rows = [json.loads(line) for line in (recorded / "collectives.jsonl").read_text().splitlines()]
    topologies = [*dict.fromkeys(row["topology"] for row in rows)]
    for row in rows:
        row["measured_seconds"] = row["size_bytes"] / 1e8 * (1 + topologies.index(row["topology"]))
        is_predicted = (row["topology"], row["size_bytes"]) != ("shared", 10**3)
        row["predicted_seconds"] = row["measured_seconds"] / 2 if is_predicted else None
    lines(tmp_path / "collectives.jsonl", rows)
    figures.collectives(Path("a.png"), tmp_path)
    figures.shared_memory(Path("a.png"), tmp_path)
    for axes in (*drawn[0].axes[:3], drawn[1].axes[0]):
        shown = [line.get_xdata() for line in axes.lines if len(line.get_xdata())]
        assert [[*sizes] for sizes in shown] == [[10**3, 10**7]] * len(shown)
    assert {*by_name(drawn[0])} == {*topologies}
    for name, line in by_name(drawn[0]).items():
        assert line.get_ydata()[-1] == pytest.approx(0.1 * (1 + topologies.index(name)))
    dotted = [
        line.get_ydata()[-1] for line in drawn[0].axes[0].lines if line.get_linestyle() == ":" and len(line.get_ydata())
    ]
    assert dotted == pytest.approx([0.05 * (1 + number) for number in range(len(topologies) - 1)]), "not the last"
    names = {"sockets, the library's": "library", "sockets, the lab's ring": "ring", "shared memory": "shared"}
    for name, line in by_name(drawn[1]).items():
        assert line.get_ydata()[-1] == pytest.approx(0.1 * (1 + topologies.index(names[name])))


def test_the_load_of_an_expert_is_relative_to_the_mean(tmp_path: Path, drawn: list[Any]) -> None:
    run_folder = record(tmp_path / "run", [2.0, 1.0])
    steps = [{"step": step, "loss": 1.0, "expert_loads": [[0], [3, 1 + step, 2 - step]]} for step in range(2)]
    lines(run_folder / "metrics.jsonl", steps)
    figures.expert_loads(tmp_path / "a.png", [str(run_folder)], layer=1)
    *experts, mean = curves(drawn[0])
    assert experts == [([1, 2], [1.5, 1.5]), ([1, 2], [0.5, 1.0]), ([1, 2], [1.0, 0.5])]
    assert mean[1] == [1, 1]


def test_runs_are_told_apart(tmp_path: Path, drawn: list[Any]) -> None:
    folders = [tmp_path / "a" / "lr=1", tmp_path / "b" / "lr=1", tmp_path / "c"]
    for index, folder in enumerate(folders):
        folder.mkdir(parents=True)
        counts = [dict.fromkeys(MEMORY_KINDS, (index + 1) * 10**6)]
        (folder / "memory.json").write_text(json.dumps(counts))
    holdings(tmp_path / "a.png", [str(folder) for folder in folders])
    labels = [label.get_text() for label in drawn[0].axes[0].get_xticklabels()]
    assert labels == [str(folders[0]), str(folders[1]), "c"]
    totals = [int(text.get_text()) for text in drawn[0].axes[0].texts]
    assert totals == [len(MEMORY_KINDS) * megabytes for megabytes in (1, 2, 3)]
    for number, megabytes in enumerate((1, 2, 3)):
        own = [bar for bar in drawn[0].axes[0].patches if abs(bar.get_x() + bar.get_width() / 2 - number) < 0.1]
        below = [bar.get_y() / megabytes for bar in own if bar.get_height() == megabytes]
        assert below == [*range(len(MEMORY_KINDS))], "the parts of a run stand on each other"
    for figure in (losses, holdings, figures.timelines, figures.memory):
        with pytest.raises(InputError, match="give one or more runs"):
            figure(tmp_path / "a.png", [])


def test_the_bytes_per_weight_are_those_of_all_weights(tmp_path: Path, drawn: list[Any]) -> None:
    """A rank that holds a quarter of the weights, with their gradients and Adam's state, and has gathered half."""
    (tmp_path / "memory.json").write_text(
        json.dumps([dict(zip(MEMORY_KINDS, (400, 400, 800, 0, 800, 0), strict=True))])
    )
    figures.sharding(tmp_path / "a.png", [f"weights-4={tmp_path}"])
    assert [points for points in curves(drawn[0]) if points[0] == [4]] == [([4], [4.0]), ([4], [6.0])]
    for number, shard in enumerate(("optimizer", "gradients"), 1):  # of the same bytes: it holds all of the weights
        figures.sharding(tmp_path / "a.png", [f"{shard}-2={tmp_path}"])
        assert [points for points in curves(drawn[number]) if points[0] == [2]] == [([2], [16.0]), ([2], [24.0])]
    holdings(tmp_path / "a.png", [str(tmp_path)])
    names = [text.get_text() for text in drawn[-1].legends[0].get_texts()]
    assert names == [kind for kind in MEMORY_KINDS if kind != "copy to undo"], "activations too, of which it has none"
    theory = {name.partition(":")[0]: line for name, line in by_name(drawn[0]).items()}
    for name, of_four in {"optimizer": 10, "gradients": 7, "weights": 4}.items():
        ranks, each = theory[name].get_data()
        assert (ranks[0], each[0]) == (1, 16), "alone, a rank holds all"
        assert (ranks[-1], each[-1]) == pytest.approx((4, of_four)), name


def test_names_are_drawn_as_they_are(tmp_path: Path, drawn: list[Any]) -> None:
    names = ["_baseline", "$5 a day", "a$b$c", "_$x_1$", "plain"]
    runs = [f"{name}={record(tmp_path / str(number), [1.0])}" for number, name in enumerate(names)]
    losses(tmp_path / "a.png", runs, title="_$ and $")
    (axes,) = drawn[0].axes
    texts = [*axes.get_legend().get_texts(), axes.title]
    assert [text.get_text().strip().replace("\\$", "$") for text in texts] == [*names, "_$ and $"]
    for text in texts:  # dollars that are escaped are no math
        assert text.get_text().count("$") == text.get_text().count("\\$")


def test_a_folder_of_runs_stands_for_the_one_that_began_last(tmp_path: Path, drawn: list[Any]) -> None:
    for began, name in enumerate(("later", "earlier"), start=1):
        (record(tmp_path / name, [float(began)]) / "config.json").write_text("{}")
        os.utime(tmp_path / name / "config.json", (1000 - began, 1000 - began))
    losses(tmp_path / "a.png", [str(tmp_path)], smooth=1)
    assert curves(drawn[0]) == [([1], [1.0])]


def test_runs_that_lack_what_a_figure_shows_are_told(recorded: Path, tmp_path: Path) -> None:
    plain, alone, sockets = record(tmp_path / "plain", [1.0]), tmp_path / "alone.json", tmp_path / "sockets"
    none = record(tmp_path / "none", [None])
    write_chrome(Trace([RankTrace([Event(STEP, "step 0", 0, 4)])], {}, None), alone)
    sockets.mkdir()
    lines(plain / "collectives.jsonl", [])
    rows = map(json.loads, (recorded / "collectives.jsonl").read_text().splitlines())
    lines(sockets / "collectives.jsonl", [row for row in rows if row["topology"] != "shared"])
    cases: list[tuple[Callable[..., None], Any, str]] = [
        (figures.partings, [str(plain)], "give at least two runs"),
        (figures.partings, [str(plain), str(none)], "none of its steps has a loss that .*/plain has too"),
        (figures.expert_loads, [str(plain)], "its records have no loads of experts in layer 0"),
        (figures.ring_steps, [f"a={alone}"], "a: rank 0 was in no ring"),
        (figures.sharding, [f"weights={recorded}"], "weights: name a run by what it shards and its ranks"),
        (figures.shared_memory, sockets, "its ranks did not share memory"),
        (figures.memory, [f"run={tmp_path / 'nothing'}"], "this is not the trace of a run; --trace records one"),
        (figures.memory, [f"run={alone}"], "these traces have no stages"),
        (figures.collectives, tmp_path, "there is no table of collectives"),
        (figures.collectives, plain, "there is no table of collectives"),
        (lambda png, ranks: diagrams.topologies(png, world_size=ranks), 1, "--world-size 1: give 2 to 32 ranks"),
        (partial(losses, smooth=0), [str(plain)], "--smooth 0: give at least 1 step"),
    ]
    for draw_figure, run, told in cases:
        with pytest.raises(InputError, match=told):
            draw_figure(tmp_path / "a.png", run)


def test_moving_average() -> None:
    assert moving_average([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert moving_average([1.0, 3.0], 5) == [1.0, 2.0]


def test_a_folder_that_holds_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file; give NAME=RUN with a run's folder"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{not json")
    ended = fork_python("-m", "distlab.figures", "losses", tmp_path / "x.png", f"a={tmp_path}").finish()
    assert (ended.status, ended.out) == (2, ""), "no path of a figure that was not drawn"
    assert "these are not the metrics of a run" in ended.err
    assert "Traceback" not in ended.err
