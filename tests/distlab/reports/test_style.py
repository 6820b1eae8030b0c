"""One style for all figures: its colors, sizes and background, texts that can be read, files that are small."""

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from PIL import Image
from support.chapters import load
from support.processes import LAB

from distlab.comm.recorder import COMPUTE, STEP, WAIT, Event
from distlab.pipeline.actions import ActionCosts, Backward, BackwardInput, BackwardWeight, Forward, Recompute
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import all_stages
from distlab.reports import figures, style
from distlab.reports.memory import KINDS
from distlab.reports.timeline import draw, planned_panel
from distlab.reports.trace import RankTrace, Trace, write_chrome

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

MOST_BYTES = 200_000
STYLED_WIDTH = round(style.WIDTH * style.DPI)
# Their runs need a quiet machine; a figure that has been drawn again leaves the set.
IMAGES = sorted((LAB / "imgs").glob("*.png"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that a figure is drawn from: metrics, a trace of a pipeline, counts of memory, collectives."""
    folder = tmp_path_factory.mktemp("run")
    metrics = [{"step": s, "loss": 8 / (1 + s), "tokens": 1536 * (1 + s), "seconds": 1.5} for s in range(600)]
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
                *(Event(WAIT, "wait", a.end, b.start) for a, b in itertools.pairwise(spans) if a.end < b.start),
            ],
            [(s.end, 10**6) for s in spans],
        )
        for spans in plan.spans
    ]
    write_chrome(Trace(ranks, 1, 4, programs), folder / "trace.json")
    (folder / "memory.json").write_text(json.dumps([dict.fromkeys(KINDS, 10**7)]))
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
    "sharding": lambda png, run: figures.sharding(png, [f"{kind}-8={run}" for kind in ("optimizer", "weights")]),
    "schedules": lambda png, run: figures.schedules(png, stages=2, micro_batches=4),
    "layout": lambda png, run: figures.layout(png),
    "splits": lambda png, run: figures.splits(png),
    "topologies": lambda png, run: figures.topologies(png),
    "collectives": lambda png, run: figures.collectives(png, run),
    "shared_memory": lambda png, run: figures.shared_memory(png, run),
    "show_schedule": lambda png, run: draw(png, [planned_panel("dapple", simulate(all_stages("dapple", 4, 8)))]),
    "network": lambda png, run: draw_network(png),
    "slow_training": lambda png, run: draw_slow_training(png),
}


class Drawn(NamedTuple):
    """A text that has been drawn, and the pixels that it takes."""

    text: "Text"
    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: "Drawn") -> bool:
        # By more than the space above letters without ascenders.
        across = min(self.right, other.right) - max(self.left, other.left)
        return across > 1 and min(self.top, other.top) - max(self.bottom, other.bottom) > 2


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> dict[int, Drawn]:
    """The texts that are drawn during a test, each as it was drawn last: the layout is found by drawing."""
    from matplotlib.text import Text

    drawn: dict[int, Drawn] = {}
    draw_text = Text.draw

    def record(text: Text, renderer: Any) -> None:
        draw_text(text, renderer)
        if text.get_visible() and text.get_text().strip():
            drawn[id(text)] = Drawn(text, *text.get_window_extent(renderer).extents)

    monkeypatch.setattr(Text, "draw", record)
    return drawn


def test_every_figure_of_the_command_is_looked_at() -> None:
    assert {figure.__name__ for figure in figures.FIGURES} < DRAWN.keys()


@pytest.mark.parametrize("name", DRAWN)
def test_figures_are_of_one_style_and_legible(
    name: str, run: Path, tmp_path: Path, texts: dict[int, Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    save = style.save
    monkeypatch.setattr(style, "save", lambda figure, png: (drawn.append(figure), save(figure, png)))
    DRAWN[name](tmp_path / "a.png", run)
    [figure] = drawn
    assert figure.get_figwidth() == style.WIDTH
    check_file(tmp_path / "a.png")
    legible = [*texts.values()]
    assert len(legible) > 5
    assert {text.text.get_fontsize() for text in legible} <= {style.SMALL, style.TEXT, style.TITLE}
    assert {text.text.get_color() for text in legible} == {style.INK}
    width, height = (inches * style.DPI for inches in figure.get_size_inches())
    cut_off = [t.text.get_text() for t in legible if t.left < 0 or t.bottom < 0 or t.right > width or t.top > height]
    assert not cut_off
    pairs = [(a.text.get_text(), b.text.get_text()) for a, b in itertools.combinations(legible, 2) if a.overlaps(b)]
    assert not pairs


@pytest.mark.parametrize("png", IMAGES, ids=lambda png: png.name)
def test_the_figures_of_the_pages_are_small_and_of_that_style(png: Path) -> None:
    check_file(png)


def check_file(png: Path) -> None:
    assert png.stat().st_size <= MOST_BYTES
    with Image.open(png) as image:
        assert image.width == STYLED_WIDTH
        assert not image.has_transparency_data
        corners = itertools.product((0, image.width - 1), (0, image.height - 1))
        background = {image.convert("RGB").getpixel(corner) for corner in corners}
    assert background == {tuple(bytes.fromhex(style.BACKGROUND[1:]))}


def test_colors_of_actions_are_those_of_the_palette() -> None:
    colors = {kind.color for kind in (Forward, Recompute, Backward, BackwardInput, BackwardWeight)}
    assert colors < {*style.SERIES, style.YELLOW}
    assert len(colors) == 5


def test_no_other_module_sets_a_style() -> None:
    sources = [path for folder in LAB.iterdir() for path in folder.rglob("*.py") if not folder.name.startswith(".")]
    names = {path: path.relative_to(LAB).as_posix() for path in sources if not path.is_relative_to(LAB / "tests")}
    found = {name for path, name in names.items() if re.search(r'matplotlib|"#[0-9a-f]{6}"', path.read_text(), re.I)}
    assert found == {"src/distlab/reports/style.py", "src/distlab/pipeline/actions.py"}
