"""Timelines and rings as they are drawn: each bar in its row, at its time, in the color of its kind."""

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from distlab.comm.recorder import COMPUTE, PART, STEP, Event
from distlab.pipeline.actions import ACTION_KINDS, ActionCosts
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import all_stages
from distlab.reports.timeline import MEASURED, PLANNED, Bar, Panel, draw, draw_schedules
from distlab.reports.trace import RankTrace, Trace, write_chrome
from distlab_figures import runs as figures


def test_each_kind_of_bar_has_a_color_of_its_own_that_the_legend_explains(drawn: list[Any]) -> None:
    labels = "F0|F0'|F0''|F0'''|F0*|R0|B0|I0|W0|ring step 0|ring step 1|ring step 2|wait|repair".split("|")
    bars = [Bar(0, place, place + 1, label) for place, label in enumerate(labels)]
    draw(Path("a.png"), [Panel("", ["rank 0"], bars, "ms")])
    colors = dict(zip(labels, (bar.get_facecolor() for bar in drawn[0].axes[0].patches), strict=True))
    assert len({*colors.values()}) == len(labels), "also the stages of a worker, and the steps of a ring"
    for one, lighter in (
        ("F0", "F0'"),
        ("F0'", "F0''"),
        ("ring step 0", "ring step 1"),
        ("ring step 1", "ring step 2"),
    ):
        assert all(before <= part for before, part in zip(colors[one], colors[lighter], strict=True)), lighter
    assert [to_hex(colors[f"{letter}0"]) for letter in "FRBIW"] == [ACTION_KINDS[letter].color for letter in "FRBIW"]
    [shown] = drawn[0].legends
    entries = zip(shown.get_texts(), shown.get_patches(), strict=True)
    told = {text.get_text().partition(":")[0]: swatch.get_facecolor() for text, swatch in entries}
    first = {**{letter: f"{letter}0" for letter in "FRBIW"}, "ring step": "ring step 0", "*": "F0*"}
    assert told == {kind: colors[first.get(kind, kind)] for kind in (*first, "wait", "repair")}
    panels = [
        Panel("", ["rank 0"], [Bar(0, 0, 1, f"{letter}0") for letter in letters], "ms") for letters in ("bB", "iI")
    ]
    draw(Path("a.png"), panels)
    [shown] = drawn[1].legends
    assert {text.get_text().partition(":")[0] for text in shown.get_texts()} == {"B, b", "I, i"}, "of one color"


def test_bars_have_the_names_of_their_rows_from_the_top_also_a_dead_rank_that_has_none(drawn: list[Any]) -> None:
    bars = [Bar(0, 0, 2, "F0", PLANNED), Bar(0, 1, 3, "F0", MEASURED), Bar(2, 0, 1, "compute")]
    draw(Path("a.png"), [Panel("", ["rank 0", "rank 1", "rank 2"], bars, "ms", deaths=[(1, 0.5)])])
    [axes] = drawn[0].axes
    names = dict(zip(axes.get_yticks(), (label.get_text() for label in axes.get_yticklabels()), strict=True))
    heights = [bar.get_y() + bar.get_height() / 2 for bar in axes.patches]
    assert [names[height] for height in heights] == ["plan", "rank 0", "rank 2"]
    assert sorted(heights) == heights
    written = [(text.get_text(), *text.get_position()) for text in axes.texts]
    assert written == [("F0", 1, heights[0]), ("F0", 2, heights[1])], "only actions, in the middle of their bars"
    assert axes.yaxis_inverted(), "rank 0 is at the top"
    [death] = axes.lines
    assert ([*death.get_xdata()], names[death.get_ydata()[0]]) == ([0.5], "rank 1")
    assert {round(low) for low in (*axes.get_xlim(), *axes.get_ylim())} == {0, 3}


@pytest.mark.parametrize(("schedule", "several"), [("dapple", False), ("zb-v", True)])
def test_only_workers_with_several_stages_have_lighter_ones(schedule: str, several: bool, drawn: list[Any]) -> None:
    """And a step of median length is drawn: the longest, with a pause, is not. Neighbors have the same stage."""
    costs = ActionCosts([1, 2, 2, 1], [2, 4, 4, 2])  # by stage, such that worker 1 is idle for less time
    plan = simulate(programs := all_stages(schedule, 2, 4), costs)
    by_rank = [spans for spans in plan.spans for _ in range(2)]
    ranks, at = [RankTrace([]) for _ in by_rank], 0.0
    for pause in (0.0, 0.0, 0.0, plan.makespan):
        for rank, spans in zip(ranks, by_rank, strict=True):
            rank.events.append(Event(STEP, "step", at, at + plan.makespan + pause))
            for span in spans:
                begin = at + pause * (span.start > plan.makespan / 2)
                rank.events.append(Event(COMPUTE, plan.labels[span.action], begin + span.start, begin + span.end))
        at += plan.makespan + pause
    draw_schedules(Path("a.png"), [(schedule, Trace(ranks, {"pp": 2, "dp": 2}, programs))])
    [axes] = drawn[0].axes
    assert ("lighter" in axes.get_xlabel()) == several
    assert axes.yaxis_inverted(), "the plan is at the top"
    idle = re.findall(r"[\d.]+(?=%)", axes.get_title(loc="left"))
    assert idle == 2 * [f"{50 * sum(plan.bubble):.1f}"], "of both workers; as measured in this step, just the same"
    rows: dict[float, list[tuple[int, int]]] = {}
    for bar in sorted(axes.patches, key=lambda bar: bar.get_y()):
        rows.setdefault(bar.get_y(), []).append((round(bar.get_x()), round(bar.get_width())))
    middles = sorted({bar.get_y() + bar.get_height() / 2 for bar in axes.patches})
    halves = middles[: len(ranks)], middles[len(ranks) :]
    assert [*axes.get_yticks()] == pytest.approx([sum(half) / len(ranks) for half in halves]), "plan, and measured"
    bars = [[(round(1e3 * span.start), round(1e3 * (span.end - span.start))) for span in line] for line in by_rank]
    assert [sorted(row) for row in rows.values()] == 2 * bars, "each rank's passes, by the plan, and as measured"
    numbers = {(text.get_position()[1], round(text.get_position()[0])): int(text.get_text()) for text in axes.texts}
    assert numbers == {
        (row + 0.5, round(500 * (span.start + span.end))): span.action.micro_batch
        for row, line in enumerate(by_rank)
        for span in line
    }


def test_steps_of_a_ring_are_side_by_side_and_the_busiest_rank_is_relative_to_the_mean(
    tmp_path: Path, drawn: list[Any]
) -> None:
    steps = [Event(PART, f"ring step {n}{way}", n / 4, n / 4 + 0.125) for n in range(3) for way in ("", ", backward")]
    ranks = [RankTrace([Event(STEP, "step 0", 0.0, 1.0), *own]) for own in (steps, steps[:1], steps[:1])]
    write_chrome(Trace(ranks, {"cp": 3}), tmp_path / "trace.json")
    figures.ring_steps(tmp_path / "a.png", [f"run={tmp_path / 'trace.json'}"])
    axes = drawn[0].axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [
        (0, 250),
        (250, 250),
        (500, 250),
        (0, 125),
        (0, 125),
    ]
    assert "busiest rank 2.25 " in axes.get_title()
