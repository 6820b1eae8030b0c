"""The playground: what it says is what the library says, and a browser opens every notebook without another machine."""

import functools
import json
import math
import re
import runpy
import signal
import socket
import sys
from base64 import b64decode
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from support.browser import CHROMIUM, Browser, Page
from support.processes import finish, start

from distlab.comm.link import Link
from distlab.pipeline.plan import Plan, simulate
from distlab.pipeline.schedules import all_stages, schedule_names
from distlab.show_schedule import Request as ScheduleRequest
from distlab.show_schedule import plan_of
from distlab_planner.collective_model import CostModel, predict_collective
from distlab_playground import command, drawing, schedules
from distlab_playground.command import NOTEBOOKS
from distlab_playground.lessons import LESSONS, find_lesson
from simplellm.errors import InputError

MARIMO = pytest.mark.skipif(
    find_spec("marimo") is None, reason="needs marimo: pip install -r requirements-playground.txt"
)
BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

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
# Write into the first field.
WRITE = """(text => { const [field] = all('input'); field.focus();
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(field, text);
  field.dispatchEvent(new Event('input', {bubbles: true})); field.blur() })"""
# Choose an option, or keep the number of a field.
ANSWER = """(() => { const option = all('[role=radio]')[1]; if (option) option.click();
  return !!option || all('input').length > 0 })()"""
PLAYED = "+all('[role=slider]')[0].ariaValueNow"
FOCUS = "(selector => all(selector)[0].focus())"
# All drawings are on the paper.
ON_PAPER = "all('svg[role=img]').every(one => one.clientWidth > 500 && one.getBoundingClientRect().right <= innerWidth)"


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "1f1b"])
def test_a_schedule_written_as_text_is_read_as_it_was(name: str) -> None:
    programs = all_stages(name, 3, 6)
    assert schedules.typed(schedules.as_typed(simulate(programs))) == programs


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("F0 B0\nF0 X0", "worker 1, X0: no such action; there are F (Forward)"),
        ("F0 B0\nF0'", "worker 1, F0': it holds 1 stages"),
        ("F0 B0\none: F0", "worker 1, one: give the numbers of its stages"),
        ("F0 then B0", "worker 0, then: give a worker's actions on a line"),
        ("B0 F0\nF0 B0", "stage 0 runs B0 before F0"),  # the library's
        ("F0 F1 B0 B1\nF1 B1 F0 B0", "both ends of a link must agree on the order"),
        ("", "the schedule has no workers"),
    ],
)
def test_a_schedule_that_cannot_be_read_or_run_ends_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        simulate(schedules.typed(text))
    assert sentence in str(error.value)


def test_a_schedule_is_played_in_order_and_drawn_whole() -> None:
    title, plan, costs = plan_of(
        ScheduleRequest("dapple", stages=2, micro_batches=4, pipelines=2, dead="2", transfer=1)
    )
    order = drawing.in_order(plan)
    assert [span.start for _, span in order] == sorted(span.start for _, span in order)
    assert len(order) == sum(map(len, plan.spans)) == drawing.passes(plan, plan.rows, 5, title).count('class="bar"')
    assert "*" in drawing.passes(plan, plan.rows, 5, title)  # work of the dead worker
    for line, most in zip(plan.spans, plan.peak_bytes, strict=True):
        assert max(size for _, size in schedules.kept(line, costs)) == most
    worker, span = order[1]
    said = schedules.says(plan, plan.rows, 2)
    assert said.startswith(f"At {span.start:g}, {plan.rows[worker]} begins {plan.labels[span.action]}, forward of")


@functools.cache
def loaded(name: str) -> Any:
    return runpy.run_path(str(NOTEBOOKS / f"{name}.py"))["app"]


def shown(name: str, guess: str, **fields: object) -> tuple[str, Any]:
    """Run a notebook as a plain program, with a guess locked and values in fields; return its text and its values."""
    given: dict[str, Any] = {field: SimpleNamespace(value=value) for field, value in fields.items()}
    if fields:  # the question is not what is asked
        given |= {"bubbles": {guess: 0.25, "zb-v": 0.01}, "question": None}
    outputs, values = loaded(name).run(defs={"locked": lambda: guess, "lock": None, **given})
    return " ".join(output.text for output in outputs if hasattr(output, "text")), values


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
    assert "own_plan" not in values


def test_a_busy_port_is_told_in_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {port}: cannot listen there .*; give another one"):
            command.start(command.Request(port, browser=False))
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a playground that knows one run."""
    run = tmp_path / "runs/first"
    run.mkdir(parents=True)
    settings = {"steps": 2, "schedule": "dapple", "micro_batches": 2}
    (run / "config.json").write_text(json.dumps({"settings": settings, "layout": {"dp": 1, "pp": 1}}))
    spent = {"step": 0, "loss": 5.0, "tokens": 8, "seconds": 2.0, "waited_seconds": 0.5, "collective_seconds": 0.25}
    (run / "metrics.jsonl").write_text(f"{json.dumps(spent)}\n{json.dumps(spent | {'step': 1, 'tokens': 16})}\n")
    playground = start(sys.executable, "-m", "distlab.launch", "playground", "--no-browser", cwd=tmp_path)
    try:
        assert playground.stdout is not None
        yield playground.stdout.readline().split()[1]
    finally:
        playground.send_signal(signal.SIGINT)
        ended = finish(playground)
        assert "Traceback" not in ended.err


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
            wait_for(page, f"{LOCK} && {ANSWER}")
            lock(page)
            wait_for(page, f"!{LOCK} && {DRAWN[path]}")
        page = apps["/layouts"]
        page.value(f"{ALL}; all('button').find(button => button.innerText == 'Plan').focus()")
        page.press("Enter")
        wait_for(page, "all('td').some(cell => cell.innerText == '8 dp') && all('svg .bar').length")
        page = apps["/schedules"]
        page.call("Page.bringToFront")
        page.value(f"{ALL}; {FOCUS}('[role=switch]')")
        page.press(" ")  # plays from the beginning
        wait_for(page, f"{PLAYED} > 1 && {PLAYED} < 36")
        page.press(" ")  # pauses
        wait_for(page, "!all('marimo-refresh').length")
        paused = page.value(f"{ALL}; {PLAYED}")
        page.value(f"{ALL}; {FOCUS}('[role=slider]')")
        for at in (paused + 1, paused + 2):
            page.press("ArrowRight")
            wait_for(page, f"{PLAYED} == {at}")
            pale = 36 - at
            wait_for(page, f"all('svg g[opacity=\"{drawing.PLAYED_NOT_YET}\"]').length == {pale}")
        page.call("Emulation.setEmulatedMedia", media="print")
        assert page.value(f"{ALL}; {ON_PAPER}")
        printed = b64decode(page.call("Page.printToPDF")["data"])
        assert len(re.findall(rb"/Type\s*/Page\b", printed)) > 1, "all of it, not only what is in the window"
        for file in sorted(LESSONS.glob("*.py")):
            page, lesson = opened(f"lessons/{file.stem}/"), find_lesson(file.stem.partition("_")[2])
            wait_for(page, f"{LOCK} && all('input').length == {len(lesson.questions) + 1}")
            for one in lesson.questions:
                assert page.value(f"{ALL}; all('*').some(each => each.textContent.includes({json.dumps(one.asks)}))")
        page = opened("lessons/2_collectives/")  # the only lesson that starts no ranks
        wait_for(page, f"!!{LOCK}")
        page.value(f"{ALL}; {WRITE}('')")
        lock(page)
        wait_for(page, "all('*').some(one => one.textContent == 'Give a number for each question.')")
        page.value(f"{ALL}; {WRITE}('7')")
        lock(page)
        wait_for(page, "all('a').some(link => link.innerText.includes('collectives-nobody.json'))")
    assert not [said for page in pages for said in page.console if said.startswith("error")]
    asked = {urlsplit(request).hostname for page in pages for request in page.requests}
    assert asked <= {"127.0.0.1", None}, asked
