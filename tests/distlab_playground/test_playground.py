"""The playground: what it says is what the library says, and a browser opens every notebook without another machine."""

import json
import math
import os
import re
import signal
import socket
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from support.browser import CHROMIUM, Browser, Page
from support.notebooks import MARIMO, outputs
from support.processes import finish, start_server

from distlab.comm.link import Link
from distlab.pipeline.plan import Plan, simulate
from distlab.pipeline.schedules import AUTO, SCHEDULES, all_stages, schedule_names
from distlab.reports import style
from distlab.show_schedule import Request as ScheduleRequest
from distlab.show_schedule import plan_of
from distlab_page.contents import NO_BUBBLE
from distlab_planner.collective_model import CostModel, predict_collective
from distlab_playground import classroom, command, drawing, playback, runs, schedules
from distlab_playground.lessons import Outcome, all_lessons
from simplellm.errors import InputError

BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

GUESSES = {"schedules": "gpipe", "collectives": "tree", "layouts": "a pipeline of 8 stages", "records": 7}
DRAWN = {  # by app, what it shows after the guess
    "/schedules": "all('svg .bar').length > 100 && all('[role=slider]').length",
    "/collectives": "all('svg .bar').length && all('table').length > 1",
    "/layouts": "all('button').some(button => button.innerText == 'Plan')",
    "/records": "all('svg .bar').length",
}
# `all(selector)`: the elements in the page and in the shadow trees of its elements.
ALL = """(() => { globalThis.all = (selector, root = document) => {
  const found = [...root.querySelectorAll(selector)];
  for (const one of root.querySelectorAll("*")) if (one.shadowRoot) found.push(...all(selector, one.shadowRoot));
  return found; } })()"""
LOCK = "all('button').find(button => button.innerText.includes('Lock'))"
# Write into all fields for numbers.
WRITE = """(text => all('input[inputmode]').forEach(field => { field.focus();
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(field, text);
  field.dispatchEvent(new Event('input', {bubbles: true})); field.blur() }))"""
# Choose from the first list.
CHOOSE = """(title => { const [list] = all('select');
  list.value = [...list.options].find(one => one.text == title).value;
  list.dispatchEvent(new Event('change', {bubbles: true})); return true })"""
# Choose an option, or write a number.
ANSWER = f"(all('[role=radio]')[1] ? all('[role=radio]')[1].click() : {WRITE}('7'), true)"
PLACE = "+all('[role=slider]')[0].ariaValueNow"
PLAYED = {  # by app, how many of its actions or messages are shown
    "/collectives": "all('svg path.bar').length",
    "/schedules": f"36 - all('svg g[opacity=\"{drawing.PLAYED_NOT_YET}\"]').length",
}
FOCUS = "(selector => all(selector)[0].focus())"
# All drawings and tables are on the paper.
ON_PAPER = """all('svg[role=img]').every(one => one.clientWidth > 500) && all('svg[role=img], table').every(one =>
  one.getBoundingClientRect().right <= innerWidth)"""


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "1f1b"])
def test_a_schedule_written_as_text_is_read_as_it_was(name: str) -> None:
    programs = all_stages(name, 3, 6)
    assert schedules.typed(schedules.as_typed(simulate(programs))) == programs


def test_workers_whose_stages_have_other_numbers_are_written_with_these() -> None:
    text = "1: F0 B0\n0: F0 B0"
    assert schedules.as_typed(simulate(schedules.typed(text))) == text


def test_the_newest_run_is_the_first(folder: Path) -> None:
    write_run(folder, steps=2)
    os.utime(folder / "config.json", (1, 1))
    assert runs.known(folder) == [str(folder / "runs/first"), str(folder)]
    os.utime(folder / "runs/first/config.json", (0, 0))
    assert runs.known(folder) == [str(folder), str(folder / "runs/first")]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("F0 B0\nF0 X0", "worker 1, X0: no such action; there are F (forward)"),
        ("F0 B0\nF0'", "worker 1, F0': it holds 1 stages"),
        ("F0 B0\none: F0", "worker 1, one: give the numbers of its stages"),
        ("F0 then B0", "worker 0, then: give a worker's actions on a line"),
        ("F99999 B0", "worker 0, F99999: give a worker's actions on a line"),
        ("B0 F0\nF0 B0", "stage 0 runs B0 before F0"),  # the library's
        ("F0 F1 B0 B1\nF1 B1 F0 B0", "both ends of a link must agree on the order"),
        ("", "the schedule has no workers"),
    ],
)
def test_a_schedule_that_cannot_be_read_or_run_ends_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        simulate(schedules.typed(text))


def test_a_schedule_is_played_in_order_and_drawn_whole() -> None:
    title, plan, costs = plan_of(
        ScheduleRequest("dapple", stages=2, micro_batches=4, pipelines=2, dead="2", transfer=1)
    )
    order = drawing.in_order(plan)
    assert [span.start for _, span in order] == sorted(span.start for _, span in order)
    assert len(order) == sum(map(len, plan.spans)) == drawing.passes(plan, plan.rows, 5, title).count('class="bar"')
    assert "*" in drawing.passes(plan, plan.rows, 5, title)  # work of the dead worker
    assert drawing.passes(plan, plan.rows, 5, title).count(f'opacity="{drawing.PLAYED_NOT_YET}"') == len(order) - 5
    for line, most in zip(plan.spans, plan.peak_bytes, strict=True):
        assert max(size for _, size in schedules.kept(line, costs)) == most
    assert "it needs" not in schedules.says(simulate(all_stages("gpipe", 1, 1)), ["worker 0"], 2), "results of others"
    worker, span = order[1]
    said = schedules.says(plan, plan.rows, 2)
    assert said.startswith(f"At {span.start:g}, {plan.rows[worker]} begins {plan.labels[span.action]}, forward of")
    for played, (worker, span) in enumerate(order, start=1):
        idle = span.start - max((own.end for own in plan.spans[worker] if own.start < span.start), default=0.0)
        told = f"It was idle for {idle:g} tick{'s' * (idle != 1)} before." if idle else "."
        assert schedules.says(plan, plan.rows, played).endswith(told)
        assert ("idle" in schedules.says(plan, plan.rows, played)) == (idle > 0)


def shown(name: str, guess: object, **fields: object) -> tuple[str, Any]:
    """Run an app with a guess locked and values in its fields."""
    given: dict[str, Any] = {field: SimpleNamespace(value=value) for field, value in fields.items()}
    if name == "schedules" and fields:  # the question is not what is asked
        given |= {"bubbles": {guess: 0.25, "zb-v": 0.01}, "question": None}
    return outputs(name, guess, **given)


PLANNED = dict(machine="h100", ranks=4, global_batch=8, dmodel=1024, num_heads=8, n_layers=8, seq_len=512)
PLANNED |= dict(vocab_size=8000, dtype="bfloat16", optimizer="adam", top=4)


@MARIMO
@pytest.mark.parametrize("name", sorted({file.stem for _, file in command.apps()} - {"index", "lesson"}))
def test_an_app_shows_nothing_of_its_answer_before_a_guess_and_then_colors_for_all_readers(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before, asked = outputs(name, None)
    after, then = shown(name, GUESSES[name], **({"asked": PLANNED} if name == "layouts" else {}))
    assert ("Lock this guess" in before, "Lock this guess" in after) == (True, False)
    answers = re.compile(r"Right|No:|did not compute|<table|<svg")
    explained = ["<svg", "<table"] if name == "schedules" else []  # an example, before the question
    assert answers.findall(before) == explained
    assert answers.search(after)
    assert then.keys() > asked.keys()
    colors = {*re.findall('(?:fill|stroke)="(#[^"]*)"', after)}
    palette = {*style.SERIES, style.YELLOW, style.INK, style.BACKGROUND, style.PALE}
    assert colors <= palette, "colors that color-blind readers can distinguish"
    assert len(colors) > 4


@MARIMO
def test_of_a_long_output_the_end_is_shown() -> None:
    assert "the result" in classroom.output({"run": Outcome(9000 * "x" + " the result")}).text


@MARIMO
def test_a_playback_ends_with_the_last_place_and_begins_again() -> None:
    moves: list[Any] = []
    for control, value in ((playback.clock(3, moves.append), None), (playback.switch(3, moves.append), True)):
        control._on_change(value)
    assert [[move(place) for place in (1, 2, 3)] for move in moves] == [[2, 3, 3], [1, 2, 1]]


def test_the_bubbles_are_those_of_the_library_s_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "my/order.py", SCHEDULES["gpipe"])
    bubbles = schedules.bubbles(2, 4)
    assert {"gpipe", "dapple", "zb-h1"} <= bubbles.keys()
    assert not {AUTO, "my/order.py"} & bubbles.keys()
    assert schedules.bubbles(2, 4, steps=10)["zb-v"] < bubbles["zb-v"] / 2, "a step fills the bubble of another"


def test_the_verdict_names_the_schedules_without_a_bubble_if_there_are_any() -> None:
    bubbles = {"gpipe": 0.25, "zb-h1": NO_BUBBLE, "zb-h2": NO_BUBBLE / 2, "zb-v": NO_BUBBLE / 4}
    assert schedules.verdict("zb-h2", bubbles).startswith("Right: almost none is left by **zb-v and zb-h2**,")
    assert schedules.verdict("zb-h1", bubbles).startswith("No: almost none is left by **zb-v and zb-h2**,")
    del bubbles["zb-v"], bubbles["zb-h2"]
    assert schedules.verdict("gpipe", bubbles).startswith("None of them: the least is that of **zb-h1**, 2.0%.")


@MARIMO
def test_the_notebooks_show_the_numbers_of_the_library() -> None:
    def rows(text: str) -> list[list[str]]:
        return [re.findall("<td[^>]*>([^<]*)<", row) for row in re.findall("<tr>.*?</tr>", text)]

    text, values = shown("schedules", "gpipe")
    plan = simulate(all_stages("dapple", 3, 6))
    assert f"{plan.makespan:g} ticks, idle {fmean(plan.bubble):.1%}" in text
    assert [span.end for line in values["plan"].spans for span in line] == [
        span.end for line in plan.spans for span in line
    ]
    passes = [row for row in rows(text) if len(row) == 5]
    assert [row[1:4] for row in passes] == [
        [plan.labels[span.action], f"{span.start:g}", f"{span.end:g}"] for line in plan.spans for span in line
    ]
    most = [max(float(row[4]) for row in passes if row[0] == f"worker {worker}") for worker in range(3)]
    assert most == plan.peak_live, "each keeps what is not yet used"
    text, values = shown("collectives", "tree")
    world = values["world"]
    assert [[row[1], row[2], row[5]] for row in rows(text) if len(row) == 6] == [
        [f"{one.sender}", f"{one.receiver}", f"{one.ended_seconds * 1e3:.4g}"] for one in world.messages
    ]
    costs = CostModel(Link(20e-6, 1.25e9), math.inf, math.inf, one_card=True)
    for size, ranks in ((4_000_000, 8), (4_000, 8), (1_000_000, 4)):
        for topology in ("naive", "tree", "butterfly", "ring"):
            milliseconds = predict_collective("all-reduce", topology, size, ranks, costs).makespan * 1e3
            assert f">{milliseconds:.3f}<" in text, (size, topology)


@MARIMO
def test_the_page_of_a_run_says_that_it_was_killed_or_that_it_is_none(tmp_path: Path) -> None:
    write_run(tmp_path, steps=50)
    (tmp_path / "launcher.log").write_text("# rank 1 failed: killed by SIGKILL\n")
    text, _ = shown("records", 7, folder=str(tmp_path))
    assert "ended early, after 2 of 50 steps. Rank 1 failed: killed by SIGKILL" in text
    (tmp_path / "metrics.jsonl").unlink()
    assert "ended early, after 0 of 50 steps." in shown("records", 7, folder=str(tmp_path))[0]
    for content in ('{"settings": {', "{}"):
        (tmp_path / "config.json").write_text(content)
        text, values = shown("records", 7, folder=str(tmp_path))
        assert f"The library says: {tmp_path}: this is not a run" in text
        assert "page" not in values


FIELDS = dict(schedule="dapple", workers=3, micro_batches=4, chunks=2, forward=1, inputs=1, weights=1, transfer=0)
FIELDS |= dict(limit=3, pipelines=1, dead="", steps=1)


@MARIMO
def test_costs_limits_deaths_and_own_schedules_reach_the_library() -> None:
    def played(**fields: object) -> tuple[str, Any]:
        return shown("schedules", "gpipe", **FIELDS | fields)

    def as_told(**given: Any) -> list[tuple[str, float, float]]:
        _, plan, _ = plan_of(ScheduleRequest(stages=3, micro_batches=4, **given))
        return spans(plan)

    def spans(plan: Plan) -> list[tuple[str, float, float]]:
        return [(plan.labels[span.action], span.start, span.end) for line in plan.spans for span in line]

    text, values = played(schedule="zb-h1", forward=2, inputs=3, weights=1, transfer=1)
    assert spans(values["plan"]) == as_told(schedule="zb-h1", forward=2, backward=4, weight_share=0.25, transfer=1)
    text, values = played(pipelines=2, dead="4", limit=2)
    assert spans(values["plan"]) == as_told(schedule="dapple", pipelines=2, dead="4")
    assert "worker 3" in text
    assert "worker 4<" not in text
    assert re.search(r">[FB]\d\*<", text), "the work of the dead is marked"
    over = re.search(r"Over the limit: ([^.]*)\.", text)
    assert over is not None
    assert "worker 0" in over[1]
    assert "worker 5" not in over[1]
    text, values = played(schedule="auto", limit=2)
    assert max(values["plan"].peak_bytes) <= 2
    assert "No worker keeps more than the limit." in text
    text, values = played(schedule="zb-v", steps=10)
    assert spans(values["plan"]) == as_told(schedule="zb-v", steps=10, run_on=True)
    for fields, sentence in (
        ({"dead": "x", "pipelines": 2}, "--dead x: give numbers from 0 to 5"),
        ({"dead": "1"}, "--dead 1: give --pipelines 2 or more"),
        ({"dead": "1,4", "pipelines": 2}, "not all that have the same stage"),
        ({"steps": 2, "pipelines": 2}, "--pipelines with --steps"),
        ({"weights": None}, "Give a number in each field."),
    ):
        text, values = played(**fields)
        assert sentence in text
        assert "plan" not in values
    text, _ = shown("schedules", "gpipe", own="F0 F1 B0 B1\nF0 B0 F1 B1")
    assert "It runs: 9 ticks" in text
    text, values = shown("schedules", "gpipe", own="F0 F1 B0 B1\nF1 B1 F0 B0")
    assert "both ends of a link must agree on the order" in text
    assert "worker 1 | F1 B1 F0 B0" in text
    assert "own_plan" not in values


def test_a_busy_port_is_told_in_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {port}: cannot listen there .*; give another one"):
            command.start(command.Request(port, browser=False))
    assert capfd.readouterr() == ("", "")


def write_run(run: Path, steps: int) -> None:
    """Write the records of a run that has taken two steps."""
    settings = {"steps": steps, "schedule": "dapple", "micro_batches": 2}
    (run / "config.json").write_text(json.dumps({"settings": settings, "layout": {"dp": 1, "pp": 1}}))
    spent = {"step": 0, "loss": 5.0, "tokens": 8, "seconds": 2.0, "waited_seconds": 0.5, "collective_seconds": 0.25}
    (run / "metrics.jsonl").write_text(f"{json.dumps(spent)}\n{json.dumps(spent | {'step': 1, 'tokens': 16})}\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With one run."""
    (tmp_path / "runs/first").mkdir(parents=True)
    write_run(tmp_path / "runs/first", steps=2)
    return tmp_path


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    """Of a playground that knows one run."""
    playground = start_server("playground", "--no-browser", cwd=folder)
    try:
        assert playground.stdout is not None
        yield playground.stdout.readline().split()[1]
    finally:
        playground.send_signal(signal.SIGINT)
        ended = finish(playground)
        assert "Traceback" not in ended.err


def says(text: str) -> str:
    return f"all('*').some(one => one.textContent.includes({json.dumps(text)}))"


@MARIMO
@BROWSER
def test_a_browser_opens_every_notebook_and_asks_no_other_machine(address: str, tmp_path: Path) -> None:
    for headers in ({"Host": "example.com"}, {"Origin": "http://example.com"}):  # another site's page, or its name
        with pytest.raises(HTTPError, match="403"):
            urlopen(Request(address, headers=headers))
    pages = list[Page]()
    with Browser(tmp_path / "browser") as browser:

        def opened(path: str) -> Page:
            pages.append(browser.open(address + path))
            return pages[-1]

        def wait_for(page: Page, expression: str) -> None:
            page.wait_for(f"{ALL}; {expression}")

        def lock(page: Page) -> None:
            page.value(f"{ALL}; {LOCK}.click()")

        wait_for(opened(""), "all('a').some(link => link.innerText == 'Pipeline schedules')")
        apps = {path: opened(path[1:]) for path in DRAWN}
        for path, page in apps.items():
            page.call("Page.bringToFront")
            wait_for(page, f"!!{LOCK}")
            lock(page)
            wait_for(page, says("Give an answer first."))
            wait_for(page, ANSWER)
            lock(page)
            wait_for(page, f"!{LOCK} && {DRAWN[path]}")
        page = apps["/layouts"]
        page.value(f"{ALL}; all('button').find(button => button.innerText == 'Plan').focus()")
        page.press("Enter")
        wait_for(page, "all('td').some(cell => cell.innerText == '8 dp') && all('svg .bar').length")
        for path, played in PLAYED.items():
            page = apps[path]
            page.call("Page.bringToFront")
            page.value(f"{ALL}; {FOCUS}('[role=switch]')")
            page.press(" ")  # plays from the beginning
            wait_for(page, f"{PLACE} > 1 && {PLACE} < 20 && {PLACE} == {played}")  # before, at the last one
            page.press(" ")  # pauses
            wait_for(page, "!all('marimo-refresh').length")
            paused = page.value(f"{ALL}; {PLACE}")
            page.value(f"{ALL}; {FOCUS}('[role=slider]')")
            for at in (paused + 1, paused + 2):
                page.press("ArrowRight")
                wait_for(page, f"{PLACE} == {at} && {played} == {at}")
        for page in apps.values():
            page.call("Emulation.setEmulatedMedia", media="print")
            page.call("Emulation.setDeviceMetricsOverride", width=740, height=900, deviceScaleFactor=1, mobile=False)
            wait_for(page, ON_PAPER)
        printed = b64decode(apps["/schedules"].call("Page.printToPDF")["data"])
        assert len(re.findall(rb"/Type\s*/Page\b", printed)) > 1, "all of it, not only what is in the window"
        named = all_lessons()[-1]  # what each lesson asks is shown in test_lessons.py
        page = opened(f"lesson/?name={named.name}")
        for one in named.questions:
            wait_for(page, says(one.asks))
        wait_for(page, f"!!{LOCK} && {CHOOSE}('2. Collectives')")  # the only lesson that starts no ranks
        wait_for(page, says("4 kB: how many"))
        lock(page)
        wait_for(page, says("Give an answer first."))
        page.value(f"{ALL}; {WRITE}('7')")
        lock(page)
        wait_for(page, "all('a').some(link => link.innerText.includes('collectives-nobody.json'))")
        wait_for(page, f"{CHOOSE}('1. Replicas')")
        wait_for(page, f"!!{LOCK}")
    assert not [said for page in pages for said in page.console if said.startswith("error")]
    asked = {urlsplit(request).hostname for page in pages for request in page.requests}
    assert asked <= {"127.0.0.1", None}, asked
