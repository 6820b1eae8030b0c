"""The table and the figure of a schedule."""

import re
from pathlib import Path

import pytest

from distlab.pipeline.schedules import SCHEDULES, stages_per_worker
from distlab.show_schedule import Request, show
from simplellm.errors import InputError

pytestmark = pytest.mark.quick


def test_table_and_costs() -> None:
    assert list(show(Request("dapple", stages=2, micro_batches=2))) == [
        "# dapple, 2 stages, 2 micro-batches; ticks: forward 1, backward 2, message 0",
        "tick       0  1  2  3  4  5  6  7  8",
        "stage 0   F0 F1  .  . B0  -  . B1  -",
        "stage 1    . F0 B0  - F1 B1  -  .  .",
        "# stage 0: idle 33.3%, keeps the activations of at most 2 micro-batches",
        "# stage 1: idle 33.3%, keeps the activations of at most 1 micro-batch",
        "# 9 ticks; 4 messages",
        "# idle by the formula (p - 1) / (m + p - 1): 33.3%",
    ]


def test_workers_with_several_stages_are_said() -> None:
    title, *_ = show(Request("interleaved", stages=2, micro_batches=4, chunks_per_stage=3, recompute=True))
    assert title.startswith("# interleaved, 2 workers with 3 stages each, 4 micro-batches, recomputed; ticks: ")


def test_a_share_of_a_pass_may_be_rounded() -> None:
    assert [*show(Request("zb-h1", backward=3, weight_share=0.3333333))][1:]


def test_ticks_of_passes_and_messages_as_asked_for() -> None:
    request = Request("naive", stages=2, micro_batches=1, forward=2, backward=3, transfer=1)
    assert list(show(request))[1:4] == [
        "tick       0  1  2  3  4  5  6  7  8  9 10 11",
        "stage 0   F0  -  .  .  .  .  .  .  . B0  -  -",
        "stage 1    .  .  . F0  - B0  -  -  .  .  .  .",
    ]


def test_steps_that_run_on() -> None:
    lines = list(show(Request("zb-h2", stages=2, micro_batches=3, steps=2, run_on=True)))
    assert lines[0].startswith("# zb-h2, 2 stages, 3 micro-batches, 2 steps that run on; ticks: ")
    assert lines[1:4] == [
        "tick       0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18",
        "stage 0   F0 F1 F2 I0 W0 I1 W1 I2 W2 F3 F4 F5 I3 W3 I4 W4 I5 W5  .",
        "stage 1    . F0 I0 F1 I1 F2 I2 W0 W1 W2 F3 I3 F4 I4 F5 I5 W3 W4 W5",
    ]
    assert lines[-1] == "# idle on average, 2 steps: 5.3%"
    *lines, last = show(Request("gpipe", stages=2, cost_per_stage="1,2", steps=3, run_on=True))
    first, second = (float(idle) for idle in re.findall(r": idle ([\d.]+)%", "\n".join(lines)))
    assert first != second
    assert float(last.rpartition(": ")[2].rstrip("%")) == pytest.approx((first + second) / 2, abs=0.11)


def test_uneven_stages_parts_of_the_backward_pass_and_the_limit_of_auto() -> None:
    """One micro-batch at a time; the second stage takes twice as long."""
    request = Request("auto", 2, 2, 1, 4, weight_share=0.25, cost_per_stage="1,2", chunks_per_stage=1, keep_at_most="1")
    assert list(show(request))[1:5] == [
        "tick       0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25",
        "stage 0   F0  .  .  .  .  .  .  .  . I0  -  - W0 F1  .  .  .  .  .  .  .  . I1  -  - W1",
        "stage 1    . F0  - I0  -  -  -  -  - W0  -  .  .  . F1  - I1  -  -  -  -  - W1  -  .  .",
        "# stage 0: idle 61.5%, keeps the activations of at most 1 micro-batch",
    ]


def test_the_work_of_a_dead_worker_has_stars() -> None:
    title, _, first, both, second, *_ = show(Request("gpipe", stages=2, micro_batches=2, pipelines=2, dead="3"))
    assert title.startswith("# gpipe, 2 stages, 2 micro-batches, 2 pipelines; ")
    assert [row.partition("  ")[0] for row in (first, both, second)] == ["stage 0 of 0", "stage 1 of 0", "stage 0 of 1"]
    assert sorted(re.findall(r"\w+\*", both)) == ["F2*", "F3*", "I2*", "I3*", "W2*", "W3*"]
    assert "*" not in first + second


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (Request("gpipe"), True),
        (Request("dapple"), True),
        (Request("naive"), False),
        (Request("gpipe", transfer=1), False),
        (Request("gpipe", stages=2, cost_per_stage="1,2"), False),
        (Request("dapple", recompute=True), False),
        (Request("dapple", pipelines=2), False),
    ],
)
def test_the_formula_is_shown_where_it_holds(asked: Request, shown: bool) -> None:
    lines = show(asked)
    assert any(line.startswith("# idle by the formula") for line in lines) == shown


@pytest.mark.parametrize("name_of_schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 2), (2, 40), (3, 120), (12, 24)])
def test_columns_are_aligned(name_of_schedule: str, stages: int, micro_batches: int) -> None:
    ticks, *rows = [
        line for line in show(Request(name_of_schedule, stages=stages, micro_batches=micro_batches)) if line[0] != "#"
    ]
    assert len(rows) == stages
    assert {len(row) for row in rows} == {len(ticks)}
    ends = {match.end() for match in re.finditer(r"\d+", ticks)}
    for stage, row in enumerate(rows):
        name = re.match(rf"stage {stage} +|stages {stage} and \d+ +", row)
        assert name is not None
        cells = list(re.compile(r"\S+").finditer(row, name.end()))
        assert {cell.end() for cell in cells} == ends
        assert sum(cell[0] != "." for cell in cells) == 3 * micro_batches * stages_per_worker(name_of_schedule)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (Request("pipe"), "pipe: no such schedule; there are naive, gpipe, dapple, interleaved, zb-h1, zb-h2, zb-v, "),
        (Request("gpipe", stages=0), "--stages 0: must be at least 1"),
        (Request("gpipe", micro_batches=-1), "--micro-batches -1: must be at least 1"),
        (Request("gpipe", forward=0), "--forward 0: must be at least 1"),
        (Request("gpipe", backward=0), "--backward 0: must be at least 1"),
        (Request("gpipe", transfer=-1), "--transfer -1: must be at least 0"),
        (Request("zb-h1", backward=1), "--backward 1 with --weight-share 0.5: both parts of a backward pass must take"),
        (Request("zb-h1", weight_share=1.0), "--weight-share 1.0: must be between 0 and 1"),
        (Request("gpipe", cost_per_stage="1,2"), "--cost-per-stage 1,2: give a whole number, 1 or more, for each of 3"),
        (Request("gpipe", cost_per_stage="1,x,1"), "--cost-per-stage 1,x,1: give a whole number, 1 or more, for each"),
        (Request("zb-v", cost_per_stage="1,1,1,1,1,0"), "--cost-per-stage 1,1,1,1,1,0: give a whole number, 1 or more"),
        (Request("zb-h1", keep_at_most="2"), "--keep-at-most 2 with --schedule zb-h1: it needs --schedule auto"),
        (Request("auto", keep_at_most="2MB"), "--keep-at-most 2MB: give micro-batches; only a run knows their bytes"),
        (Request("dapple", chunks_per_stage=3), "--chunks-per-stage 3 with --schedule dapple: its workers hold 1; "),
        (Request("auto", chunks_per_stage=3), "--chunks-per-stage 3 with --schedule auto: give 1 or 2"),
        (Request("gpipe", steps=0), "--steps 0: must be at least 1"),
        (Request("gpipe", steps=3), "--steps 3: give --run-on too; without it, all steps are the same"),
        (Request("gpipe", pipelines=2, steps=3, run_on=True), "--pipelines with --steps or --recompute: leave one"),
        (Request("gpipe", pipelines=2, recompute=True), "--pipelines with --steps or --recompute: leave one"),
        (Request("gpipe", dead="0"), "--dead 0: give --pipelines 2 or more, whose workers can replace it"),
        (Request("gpipe", pipelines=2, dead="6"), "--dead 6: give numbers from 0 to 5, not all that have the same"),
        (Request("gpipe", pipelines=2, dead="1,x"), "--dead 1,x: give numbers from 0 to 5, not all that have the same"),
        (Request("gpipe", pipelines=2, dead="1,4"), "--dead 1,4: give numbers from 0 to 5, not all that have the same"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_its_sentence(asked: Request, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        list(show(asked))


@pytest.mark.parametrize(("name", "ticks"), [("zb-v", 737), ("dualpipe-v", 744), ("interleaved", 824), ("auto", 720)])
def test_the_chapter_s_example_of_uneven_stages(name: str, ticks: int) -> None:
    request = Request(
        name, 4, 8, 10, 20, 0.4, "1,1,1,1,1,1,1,2", keep_at_most="5" if name == "auto" else None, transfer=1
    )
    assert any(line.startswith(f"# {ticks} ticks") for line in show(request))


@pytest.mark.parametrize(
    ("name", "idle", "kept"),
    [
        ("dapple", "20.0%", "4"),
        ("interleaved", "11.1%", "5.5"),
        ("zb-h1", "10.4%", "4"),
        ("dualpipe-v", "5.5%", "4.5"),
        ("zb-v", "4.8%", "4"),
    ],
)
def test_the_chapter_s_table_where_w_is_cheap(name: str, idle: str, kept: str) -> None:
    """Two stages of a worker keep half as much each as one that holds their layers."""
    lines = [line for line in show(Request(name, 4, 12, 5, 10, weight_share=0.4)) if ": idle" in line]
    assert len(lines) == 4
    assert all(f": idle {idle}," in line for line in lines)
    assert lines[0].endswith(f" at most {kept} micro-batches")


def test_the_schedule_is_drawn(tmp_path: Path) -> None:
    png = tmp_path / "new" / "gpipe.png"
    *_, last = show(Request("gpipe", png=png))
    assert last == f"# drawn to {png}"
    assert png.read_bytes().startswith(b"\x89PNG")
