"""What is computed and drawn from a trace: shares of time, the plan for measured costs, Chrome's format."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from distlab.axes.grid import Grid
from distlab.comm.recorder import COMPUTE, DEATH, MESSAGE, PART, REPAIR, SEND, STEP, WAIT, Event, Recorder
from distlab.pipeline.actions import Forward
from distlab.pipeline.schedules import all_stages
from distlab.reports import timeline
from distlab.reports.timeline import PLANNED, measured_panel, repair_panel
from distlab.reports.trace import RankTrace, Trace, merge, read_chrome, write_chrome
from distlab.run.tracing import keep_trace
from simplellm.errors import InputError

pytestmark = pytest.mark.quick

UNIT = 0.125
"""Seconds; sums of its multiples are exact."""

SCALES = [8, 1, 6, 2]
"""Of the lengths of the steps: a first one, and three others, whose mean is 3 and median 2."""

STAGES = [
    [
        (STEP, "step", -1, 14),
        (COMPUTE, "F0", 0, 1),
        (COMPUTE, "F1", 1, 2),
        (WAIT, "B0", 2, 8),
        (COMPUTE, "B0", 8, 10),
        (WAIT, "B1", 10, 11),
        (COMPUTE, "B1", 11, 13),
        (MESSAGE, "activations", 1, 2),
    ],
    [
        (STEP, "step", -1, 14),
        (WAIT, "F0", 0, 2),
        (COMPUTE, "F0", 2, 3),
        (COMPUTE, "F1", 3, 4),
        (COMPUTE, "B0", 4, 7),
        (COMPUTE, "B1", 7, 10),
        (WAIT, "step", 10, 14),
    ],
]
"""GPipe with two micro-batches and slow messages; from the first pass to the last one it takes 13."""


def rank_trace(events: Sequence[tuple[str, str, float, float]], begin: float) -> RankTrace:
    """The steps one after the other, each with these events."""
    rank = RankTrace([], [(begin, 0), (begin + UNIT, 4096)])
    for scale in SCALES:
        rank.events += [
            Event(kind, name, begin + start * scale * UNIT, begin + end * scale * UNIT)
            for kind, name, start, end in events
        ]
        begin += 20 * scale * UNIT
    return rank


@pytest.fixture
def pipelines() -> Trace:
    """Two replicas, one later than the other."""
    ranks = [rank_trace(events, begin) for begin in (1.0, 1.5) for events in STAGES]
    return Trace(ranks, {"dp": 2, "pp": 2}, all_stages("gpipe", 2, 2))


@pytest.fixture
def replicas() -> Trace:
    """No pipeline: the second rank starts later, and waits longer."""
    ranks = [[(STEP, "step", 0, 8), (WAIT, "gradients", start, 8)] for start in (6, 3)]
    return Trace([rank_trace(events, begin) for events, begin in zip(ranks, (1.0, 1.5), strict=True)], {"dp": 2})


def test_shares_of_a_pipelines_time(pipelines: Trace) -> None:
    for trace in (pipelines, replace(pipelines, layout={"ep": 2, "pp": 2})):
        for rank in range(4):
            assert trace.busy(rank) == pytest.approx([(6 / 13, 7 / 13), (8 / 13, 5 / 13)][rank % 2])
    earlier = [(WAIT, "weights", -1.0, -0.5)]  # than the first pass: not in the time that counts
    ranks = [rank_trace([*earlier, *events], 1.0) for events in STAGES]
    assert Trace(ranks, {"pp": 2}, pipelines.programs).busy(0) == pytest.approx((6 / 13, 7 / 13))
    together = replace(pipelines, pipelines=2)  # one of which begins half a second after the other
    assert together.busy(0)[0] == pytest.approx(6 * 9 * UNIT / (13 * 9 * UNIT + 3 * 0.5))


def test_the_plan_has_the_mean_costs_and_free_messages(pipelines: Trace) -> None:
    costs, plan = pipelines.costs(), pipelines.plan()
    expected = {("F", 0): 0.375, ("F", 1): 0.375, ("B", 0): 0.75, ("B", 1): 1.125}
    assert costs.measured == expected, "three times the events' units, without step 0"
    twice = [RankTrace([e._replace(start=2 * e.start, end=2 * e.end) for e in r.events]) for r in pipelines.ranks[:2]]
    of_both = replace(pipelines, ranks=[*pipelines.ranks[:2], *twice]).costs().measured
    assert of_both == {key: 1.5 * seconds for key, seconds in expected.items()}, "of all replicas"
    assert plan is not None
    assert plan.makespan == 11 * 0.375
    assert plan.bubble == pytest.approx([5 / 11, 3 / 11])


def test_report(pipelines: Trace, replicas: Trace) -> None:
    assert list(pipelines.report()) == [
        "rank 0 (stage 0 of replica 0): busy 46%, waiting 54%, bubble in theory 45%",
        "rank 1 (stage 1 of replica 0): busy 62%, waiting 38%, bubble in theory 27%",
        "rank 2 (stage 0 of replica 1): busy 46%, waiting 54%, bubble in theory 45%",
        "rank 3 (stage 1 of replica 1): busy 62%, waiting 38%, bubble in theory 27%",
    ]
    assert list(replicas.report()) == [
        "rank 0: busy 75%, waiting 25%",
        "rank 1: busy 38%, waiting 62%",
    ]
    assert list(replace(replicas, layout={"tp": 2}).report()) == list(replicas.report()), "each from its own start"
    assert replicas.plan() is None
    two_each = replace(pipelines, programs=all_stages("zb-v", 2, 2))
    assert two_each.describe(3) == "rank 3 (stages 1 and 2 of replica 1)"


def test_steps_that_run_on_overlap_and_the_plan_is_one_of_several_steps() -> None:
    """Stage 0 begins a step while stage 1 ends the one before: 18 units of work each in 20, not counting step 0."""
    passes = enumerate("F0 F1 F2 I0 W0 I1 W1 I2 W2".split())
    first = [(STEP, "step", 0, 9), *((COMPUTE, name, start, start + 1) for start, name in passes)]
    events = [[(kind, name, t + late, u + late) for kind, name, t, u in first] for late in (0, 2)]
    ranks = [
        RankTrace([Event(kind, name, n * 9.0 + t, n * 9.0 + u) for n in range(3) for kind, name, t, u in own])
        for own in events
    ]
    trace = Trace(ranks, {"pp": 2}, all_stages("zb-h2", 2, 3), run_on=True)
    assert [trace.busy(rank)[0] for rank in (0, 1)] == pytest.approx([18 / 20, 18 / 20])
    for line in trace.report():
        assert line.endswith("busy 90%, waiting 0%, bubble in theory 5%"), "of two steps: 1 in 19, and of one, 1 in 10"
    assert [line[-3:] for line in replace(trace, run_on=False).report()] == ["10%", "10%"]


def test_events_may_come_in_the_order_of_their_ends(pipelines: Trace) -> None:
    in_order = [RankTrace(sorted(rank.events, key=lambda event: event.end)) for rank in pipelines.ranks]
    by_end = replace(pipelines, ranks=in_order)
    assert by_end.ranks[0].events[0].kind != STEP
    assert list(by_end.report()) == list(pipelines.report())
    assert by_end.costs() == pipelines.costs()
    assert by_end.typical_step() == pipelines.typical_step()


def test_the_typical_step_is_the_median_without_the_first(pipelines: Trace) -> None:
    for kept, scale in ((4, 2), (2, 1), (1, 8)):
        ranks = [RankTrace([e for e in rank.events if e.kind == STEP][:kept]) for rank in pipelines.ranks]
        typical = replace(pipelines, ranks=ranks).typical_step()
        assert [event.end - event.start for event in typical] == [15 * scale * UNIT] * 4


@pytest.mark.parametrize("name", ["pipelines", "replicas"])
def test_chromes_format_gives_the_trace_back_without_its_messages(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    trace: Trace = request.getfixturevalue(name)
    trace = replace(trace, layout=dict(reversed(trace.layout.items())), run_on=True)
    assert trace.describe(1) == ("rank 1 (stage 0 of replica 1)" if name == "pipelines" else "rank 1")
    write_chrome(trace, tmp_path / "trace.json")
    again = read_chrome(tmp_path / "trace.json")
    for rank in trace.ranks:
        rank.events = [event for event in rank.events if event.kind != MESSAGE]
    assert again == trace
    assert list(again.report()) == list(trace.report())


def test_earlier_traces_do_not_name_repairs_or_pipelines(pipelines: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome(pipelines, path)
    content, now = json.loads(path.read_text()), read_chrome(path)
    del content["otherData"]["pipelines"], content["otherData"]["alive"]
    path.write_text(json.dumps(content))
    assert list(read_chrome(path).report()) == list(now.report())


def test_chromes_format_names_ranks_and_lets_messages_overlap(pipelines: Trace, tmp_path: Path) -> None:
    write_chrome(pipelines, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [
        pipelines.describe(rank) for rank in range(4)
    ]
    begun, ended = ([(e["pid"], e["id2"]["local"], e["ts"]) for e in events if e["ph"] == letter] for letter in "be")
    assert len(begun) == len({(pid, number) for pid, number, _ in begun}) == 2 * len(SCALES)
    assert [key[:2] for key in begun] == [key[:2] for key in ended]
    assert (begun[0][2], ended[0][2]) == (2e6, 3e6)


def test_in_chromes_format_an_arrow_leads_from_the_sender_into_the_wait_that_a_message_ended(tmp_path: Path) -> None:
    ranks = [[Event(SEND, "a", 2, 3, "7")], [Event(WAIT, "a", 1, 4, "7"), Event(WAIT, "b", 5, 6, "8")]]
    write_chrome(Trace([RankTrace(events) for events in ranks], {"pp": 2}), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    [(begun, sender, sent), (ended, receiver, arrived)] = [
        (event["ph"], event["pid"], event["ts"]) for event in events if event["ph"] in "sf"
    ]
    assert (begun, sender, sent, ended, receiver) == ("s", 0, 2e6, "f", 1)
    assert 3e6 < arrived < 4e6


ABOUT = {"layout": {"dp": 2}, "programs": None, "run_on": False}
ONE_HAS_MORE_STEPS = [{"ph": "X", "pid": rank, "cat": STEP, "name": STEP, "ts": 0, "dur": 1} for rank in (0, 1, 1)]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{not json",
        "[]",
        "{}",
        '{"traceEvents": [], "otherData": {}}',
        '{"traceEvents": [], "otherData": {"ranks": 1, "layout": {}, "programs": [[["X", 0, 0]]]}}',
        '{"traceEvents": [], "otherData": {"ranks": 1, "layout": {}, "programs": null, "run_on": false}}',
        json.dumps({"traceEvents": ONE_HAS_MORE_STEPS, "otherData": {**ABOUT, "ranks": 2}}),
        '{"traceEvents": [{"ph": "X", "pid": 1}], "otherData": {"ranks": 1, "dp": 1, "pp": 1, "programs": null}}',
    ],
)
def test_a_file_that_is_no_trace_is_named(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content)
    sentence = f"{path}: this is not the trace of a run; --trace records one"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        read_chrome(path)


def test_merged_ranks_share_an_origin() -> None:
    late = {"events": [Event(STEP, "step", 12.0, 13.0)], "kept_bytes": [[12.5, 8]]}
    early = {"events": [Event(WAIT, "w", 10.5, 11.0), Event(STEP, "step", 10.0, 11.0)], "kept_bytes": []}
    ranks = [
        RankTrace([Event(STEP, "step", 2.0, 3.0)], [(2.5, 8)]),
        RankTrace([Event(WAIT, "w", 0.5, 1.0), Event(STEP, "step", 0.0, 1.0)]),
    ]
    assert merge([late, early]) == ranks


def test_waits_between_two_steps_are_in_neither() -> None:
    first, second = Event(STEP, "step 0", 1, 3), Event(STEP, "step 1", 9, 11)
    within, saving, late = (Event(WAIT, "w", at, at + 1) for at in (2, 4, 10.5))
    trace = RankTrace([Event(WAIT, "w", 0, 1), within, first, saving, second, late])
    assert [trace.within(step, WAIT) for step in (first, second)] == [[within], [late]]


def test_the_time_in_a_step_of_a_ring_is_that_of_both_passes_of_a_layer() -> None:
    of_layer = ("ring step 0", 1), ("ring step 0, backward", 2), ("ring step 1", 4)
    parts = [(name, times * seconds) for times in (1, 7, 1) for name, seconds in of_layer]  # one layer is disturbed
    events = [Event(PART, name, at, at + seconds) for at, (name, seconds) in enumerate(parts)]
    trace = Trace([RankTrace([Event(STEP, "step", 0, 10), *events])], {"cp": 2})
    assert trace.seconds_in_ring(0) == {0: 3, 1: 4}
    drawn = [bar.label for bar in measured_panel("run", trace).bars]
    assert drawn == ["compute", *["ring step 0", "ring step 0", "ring step 1"] * 3]


def test_the_measured_panel_lays_the_plan_over_the_typical_step(pipelines: Trace) -> None:
    panel = measured_panel("run", pipelines)
    assert (panel.title, panel.unit, panel.rows[3]) == ("run", "ms", "rank 3\n(stage 1 of replica 1)")
    last = [(bar.label, bar.start, bar.end) for bar in panel.bars if bar.row == 3 and bar.label == "B1"]
    assert last == [("B1", 500 + 7 * 250, 500 + 10 * 250), ("B1", 6 * 375, 9 * 375)], "measured, planned"
    assert min(bar.start for bar in panel.bars) == 0
    waiting = [rank_trace([(WAIT, "weights", -1, 0), *events], begin) for begin in (1.0, 1.5) for events in STAGES]
    passes, after_waits = (
        [bar for bar in own if bar.label != "wait"]
        for own in (panel.bars, measured_panel("run", replace(pipelines, ranks=waiting)).bars)
    )
    assert passes == after_waits, "the first pass begins with the plan"
    ranks = [rank_trace(events, 1.0) for events in STAGES for _ in range(2)]  # neighbors have the same stage
    bars = measured_panel("run", Trace(ranks, {"pp": 2, "dp": 2}, pipelines.programs)).bars
    planned = [[replace(bar, row=0) for bar in bars if (bar.row, bar.edges) == (row, PLANNED)] for row in range(4)]
    assert planned[0] == planned[1] != planned[2] == planned[3]


def test_the_panel_of_a_repair_has_stars_at_the_work_of_the_dead(tmp_path: Path) -> None:
    """Rank 1 of three replicas with one micro-batch each has died; the others have numbers of their own in a trace.

    There is a second repair, later.
    """
    passes = {0: ("F0", "F1"), 2: ("F1", "F2")}
    events = [
        [Event(STEP, "step", 0, 2), Event(DEATH, "rank 1 was terminated by SIGKILL", 2, 2), Event(REPAIR, "", 2, 3)]
        + [Event(COMPUTE, name, 3 + start, 4 + start) for start, name in enumerate(own)]
        + [Event(STEP, "step", 3, 5), Event(DEATH, "rank 2 was terminated", 6, 6), Event(REPAIR, "", 6, 7)]
        + [Event(STEP, "step", start, start + 1) for start in (7, 8)]
        + [Event(WAIT, "the loss", start, start + 1) for start in (-0.5, 4.5)]  # over both ends of what is shown
        for own in passes.values()
    ]
    programs = [[Forward(0, int(name[1])) for name in own] for own in passes.values()]
    ranks = [RankTrace(own) for own in events]
    trace = Trace(ranks, {"dp": 3, "pp": 1}, programs, pipelines=3, alive=[*passes])
    assert [(repair.kind, repair.start) for repair in trace.repairs()] == [(REPAIR, 2), (REPAIR, 6)]
    panel = repair_panel(trace, trace.repairs()[0])
    assert (panel.unit, len(panel.rows)) == ("ms", 3)
    computed = [(bar.row, bar.label) for bar in panel.bars if bar.label.startswith("F")]
    assert computed == [(0, "F0"), (0, "F1*"), (2, "F1*"), (2, "F2")]
    assert [row for row, _ in panel.deaths] == [1]
    assert (min(bar.start for bar in panel.bars), max(bar.end for bar in panel.bars)) == (0, 5000)
    whole = repair_panel(replace(trace, programs=None, pipelines=1), trace.repairs()[0])
    steps = [(bar.row, bar.start, bar.end) for bar in whole.bars if bar.label == "compute"]
    assert steps == [(row, *times) for row in (0, 2) for times in ((0, 2000), (3000, 5000))], "without passes"
    assert [step[0].start for step in trace.steps()] == [8], "without the first after the last repair"
    write_chrome(trace, tmp_path / "trace.json")
    assert read_chrome(tmp_path / "trace.json") == trace
    newcomer = RankTrace([Event(STEP, "step", 7, 8)])
    assert Trace([newcomer, *ranks], {"dp": 3}).repairs() == trace.repairs(), "as the ranks that saw them tell"


def test_a_run_whose_last_step_was_repaired_has_no_step_to_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [Event(STEP, "step 0", 0, 2), Event(DEATH, "rank 1 was terminated", 2, 2), Event(REPAIR, "", 2, 3)]
    (grid := Grid(0, {"dp": 2})).keep([0])
    keep_trace([{"events": events, "kept_bytes": []}], tmp_path, grid, Recorder(), runs_on=False)
    assert "no step came after the last repair" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_of_several_repairs_the_first_is_drawn_above_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [Event(STEP, "step 0", 0, 2)]
    for rank, at in ((1, 2), (2, 5)):
        death = Event(DEATH, f"rank {rank} was terminated", at, at)
        events += [death, Event(REPAIR, "", at, at + 1), Event(STEP, "step 0", at + 1, at + 3)]
    (grid := Grid(0, {"dp": 4})).keep([0, 3])
    panels = list[timeline.Panel]()
    monkeypatch.setattr(timeline, "draw", lambda _, drawn: panels.extend(drawn))
    keep_trace([{"events": events, "kept_bytes": []}] * 2, tmp_path, grid, Recorder(), runs_on=False)
    assert [[row for row, _ in panel.deaths] for panel in panels] == [[1], []]
    assert panels[1].title == "A step as measured after the last repair"
    assert capsys.readouterr().out.endswith(": the first repair, and a step of median length, drawn\n")


def test_a_spares_records_are_those_of_the_rank_whose_place_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is behind the others: here, number 0 is rank 2, and number 1, which waits, is rank 0; rank 1 has died."""
    (grid := Grid(0, {"dp": 3})).keep([2, 0])
    steps = [Event(STEP, f"step {step}", 4 * step, 4 * step + 4) for step in range(2)]
    events = [steps, [Event(WAIT, "the gradients", 7, 8), *steps]]
    recorded, titles = [{"events": own, "kept_bytes": []} for own in events], list[str]()
    monkeypatch.setattr(timeline, "draw", lambda _, panels: titles.extend(panel.title for panel in panels))
    keep_trace(recorded, tmp_path, grid, Recorder(), runs_on=False)
    assert titles == ["A step as measured"], "without a plan"
    *busy, _, drawn = capsys.readouterr().out.splitlines()
    assert busy == ["# rank 0: busy 75%, waiting 25%", "# rank 2: busy 100%, waiting 0%"]
    assert drawn == f"# {tmp_path / 'timeline.png'}: a step of median length, drawn", "and no repair"
