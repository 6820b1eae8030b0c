"""The page of a run: its numbers are those of the records, and a browser draws it without any other file."""

import base64
import json
import os
import resource
import shutil
import signal
import socket
import statistics
import struct
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support import repairs
from support.browser import CHROMIUM, Browser
from support.page_in_browser import COLORS, DRAWN, FIGURES, OPENED, TABLES, TEXTS, as_number, in_figures, plain, tables
from support.page_numbers import Expected, named, numbers, of_schedule
from support.processes import Ended, children, finish, process_of, run, start, wait_for
from support.terminals import fork_launcher

from distlab.comm.recorder import PART, REPAIR, STEP, Event
from distlab.pipeline.schedules import AUTO, SCHEDULES
from distlab.reports import style
from distlab.reports.trace import RankTrace, Trace, write_chrome
from distlab.settings.folders import Claim
from distlab_figures.runs import timelines
from distlab_page.contents import contents
from distlab_page.drawing_library import needed_parts
from distlab_page.ends import detours
from distlab_page.records import Records, read
from distlab_page.writing import as_script, html, write
from simplellm.errors import InputError

plotly = pytest.importorskip("plotly.offline", reason="pages need plotly: pip install plotly")

MODEL = (
    "--dmodel 32 --num-heads 2 --n-layers 4 --seq-len 32 --data sample --device cpu --lr 0.05 --optimizer sgd".split()
)
LAUNCH = sys.executable, "-m", "distlab.launch"
STEPS = 50


def launch(*args: object) -> Ended:
    ended = fork_launcher(*args).finish(deadline=120)
    assert ended.status == 0, ended.err
    return ended


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "hybrid <b>&"  # a name that would be markup
    batch = "--batch-size 6 --micro-batches 3 --eval-every 25 --eval-sequences 4".split()
    ended = launch("hybrid", *MODEL, *batch, "--steps", STEPS, "--trace", "--page", "--out", out)
    assert f"# the run as a page: {out / 'page.html'}" in ended.out
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "alone"
    launch("primer", *MODEL, "--batch-size", 12, "--steps", STEPS, "--out", out)
    return out


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three ranks, one of which is killed after some steps."""
    out = tmp_path_factory.mktemp("runs") / "killed"
    launcher = fork_launcher("dp-ga", *MODEL, "--steps", 100_000, "--timeout", 10, "--out", out)
    metrics = out / "metrics.jsonl"
    try:
        assert wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
        assert read(out).is_running
        assert contents(read(out))["status"]["text"].startswith("The run goes on: ")
        os.kill(process_of(1, children(launcher.pid)), signal.SIGKILL)
        assert finish(launcher).status != 0
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    return out


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_the_same_as_one_process_or_says_what_differs(hybrid: Path, alone: Path, killed: Path) -> None:
    page = contents(read(hybrid), read(alone))["verdict"]
    most = max(abs(a["loss"] - b["loss"]) for a, b in zip(lines(hybrid), lines(alone), strict=True))
    assert (page["is_same"], page["most"], page["steps"]) == (True, most, STEPS)
    assert page["text"] == f"The same run as one process: losses differ by at most {most:.2g} over 50 steps."
    for factor, dtype, is_same, text in (
        (1 + 5e-6, "float32", True, "The same run as one process: "),
        (1 + 1e-4, "float32", False, "Close to one process, but not the same run: "),
        (1 + 1e-2, "float32", False, "Not the same losses as one process: "),
        (1 + 1e-3, "bfloat16", True, "The same run as one process: "),
        (1 + 1e-2, "bfloat16", False, "Close to one process, but not the same run: "),
    ):
        config = {**read(alone).config, "settings": {**read(alone).settings, "dtype": dtype}}
        right = replace(read(alone), config=config)
        metrics = [*right.metrics[:-1], right.metrics[-1] | {"loss": right.metrics[-1]["loss"] * factor}]
        page = contents(replace(right, metrics=metrics), right)["verdict"]
        assert (page["is_same"], page["text"][: len(text)]) == (is_same, text)
        assert ("./launch.sh compare" in page["text"]) == text.startswith("Close")
    other = contents(read(killed), read(alone))["verdict"]
    assert other["is_same"] is None
    assert "tokens in a step 96 and 384" in other["text"]
    one = read(hybrid)
    rounded = replace(one, config=one.config | {"settings": one.settings | {"residual": "bfloat16"}})
    other = contents(rounded, read(alone))["verdict"]
    assert other["text"] == "Not the same training run as one process: residual bfloat16 and float32."


def test_a_verdict_says_which_losses_are_missing_and_how_many_steps_count(alone: Path) -> None:
    run, nothing = read(alone), dict.fromkeys([12, 13, 14])

    def compared(left: dict[int, float | None], right: dict[int, float | None], steps: int = STEPS) -> tuple[Any, str]:
        runs = (
            replace(run, metrics=[r | {"loss": losses.get(r["step"], r["loss"])} for r in run.metrics[:count]])
            for losses, count in ((left, STEPS), (right, steps))
        )
        page = contents(*runs)["verdict"]
        return page["is_same"], page["text"]

    for left, right, is_same, text in (
        ({12: None}, {}, False, "in step 12, the run has no finite loss."),
        ({12: float("nan")}, {}, False, "in step 12, the run has no finite loss."),
        ({}, nothing, False, "in step 12 and 2 more, one process has no finite loss."),
        (nothing, nothing, True, "equal losses over 47 of 50 steps; in step 12 and 2 more, neither has a finite loss."),
        (nothing, {14: None}, False, "in step 12 and 1 more, the run has no finite loss; in step 14, neither has a"),
        (dict.fromkeys(range(STEPS)), {}, False, "one process: in step 0 and 49 more, the run has no finite loss."),
    ):
        said = compared(left, right)
        assert said[0] == is_same
        assert text in said[1]
    assert compared({}, {}, 12)[1].endswith("equal losses over the first 12 of 50 steps (one process ended early).")
    settings = run.settings | {"report_every": 5}
    seldom = replace(run, config=run.config | {"settings": settings}, metrics=[
        r | {"loss": None} if (r["step"] + 1) % 5 else r for r in run.metrics
    ])  # fmt: skip
    assert contents(seldom, run)["verdict"]["text"].endswith("equal losses over 10 of 50 steps.")


def test_each_number_of_a_hybrid_is_computed_from_a_record(hybrid: Path, alone: Path, killed: Path) -> None:
    expected, page = Expected(hybrid), contents(read(hybrid))
    page["timeline"] = named(page["timeline"])
    for panel in ("layout", "timeline", "time"):
        shown = numbers(page.pop(panel))
        assert len(shown) > 50
        # Bars are rounded to thousandths of a millisecond; the computing time has waits within passes subtracted.
        assert shown == pytest.approx(numbers(getattr(expected, panel)()), rel=1e-6, abs=0.0011), panel

    sent, shown = expected.ledger(), page.pop("ledger")
    rows = {(int(rank), row[0]): tuple(row[2:6]) for row in shown["table"]["rows"] for rank in row[1].split(", ")}
    assert rows.keys() == sent["rows"].keys()
    for key, (messages, size, each, formula) in rows.items():
        assert (messages, size, each) == sent["rows"][key][:3]
        assert formula == (sent["rows"][key][3] and pytest.approx(sent["rows"][key][3], abs=1)), key
        assert formula is None or each == pytest.approx(formula, abs=1), key
    for rank, peer in ((rank, peer) for rank in expected.ranks for peer in expected.ranks):
        pairs = sent["pairs"][rank, peer]
        by_kind = Counter[str]()
        for kind, size, _ in shown["kinds"][rank][peer]:  # in messages and in collectives
            by_kind[kind] += size
        assert by_kind == pytest.approx(pairs)
        assert shown["matrix"][rank][peer] == pytest.approx(sum(pairs.values()))
    assert [row[2:] for row in shown["pairs"]["rows"]] == [one for line in shown["kinds"] for at in line for one in at]
    by_formula = [(size, formula) for *_, size, formula in shown["pairs"]["rows"] if formula is not None]
    assert len(by_formula) > 40
    assert all(size == pytest.approx(formula, rel=0.03) for size, formula in by_formula)

    held, shown = expected.memory(), page.pop("memory")
    assert shown["bars"] == {kind: values for kind, values in held.items() if any(values)}
    for kind, planned in shown["plan"].items():
        assert planned == pytest.approx(held[kind], rel=0.05 if kind == "activations" else 0), kind
    pair = shown["bars"], shown["plan"]
    beside = [[of[kind][rank] for of in pair] for rank in expected.ranks for kind in pair[0]]
    assert [row[2:] for row in shown["table"]["rows"]] == beside

    rows = page.pop("schedules")["table"]["rows"]
    for name, bubble, seconds, kept, bubble_of_6, bubble_in_steps in rows:
        of_own, of_6, in_steps = (of_schedule(name, 3, *one) for one in ((3, 1), (6, 1), (6, 10)))
        assert (bubble, seconds, kept) == pytest.approx(of_own or (None, None, None)), name
        assert of_6
        assert in_steps
        assert (bubble_of_6, bubble_in_steps) == pytest.approx((of_6[0], in_steps[0])), name
    assert {row[0] for row in rows} == {*SCHEDULES} - {AUTO}
    assert [row[5] for row in rows] == sorted(row[5] for row in rows)

    page["curves"] = page["curves"]["runs"][0]
    assert numbers(page.pop("curves")) == pytest.approx(numbers(expected.curves()))
    assert numbers(page) == {".status.steps": STEPS}, "all other numbers are in texts"
    for folder in (alone, killed):
        one, page = Expected(folder), contents(read(folder), read(hybrid))
        assert numbers(page["layout"]) == numbers(one.layout())
        assert numbers(page["curves"]["runs"][0]) == pytest.approx(numbers(one.curves()))
        assert page["curves"]["runs"][1] == contents(read(hybrid))["curves"]["runs"][0]


def test_a_run_that_ended_early_says_so_and_why(killed: Path) -> None:
    page = contents(read(killed))
    steps = lines(killed)[-1]["step"] + 1
    assert page["status"]["state"] == "ended early"
    assert page["status"]["text"].startswith(f"The run ended early, after {steps:,} of 100,000 steps. ")
    assert any("rank 1" in cause for cause in page["ended"]["causes"]), page["ended"]
    assert [rank["died"] for rank in page["layout"]["ranks"]] == [False, True, False]
    assert [row[-1] for row in page["layout"]["table"]["rows"]] == ["", "died", ""]
    early = contents(replace(read(killed), metrics=[]))["missing"]["ledger"]
    assert early == "The run ended before it recorded a step."
    sums = [
        sum(record[name] for record in lines(killed)) for name in ("seconds", "waited_seconds", "collective_seconds")
    ]
    assert page["time"]["rows"] == [pytest.approx((sums[0] - sums[1], sums[1] - sums[2], sums[2]))]
    waits = ["who waits for whom:", "  rank 0  waits for the gradients  -> rank 1", "  rank 1  has published no wait"]
    page = contents(replace(read(killed), logs={"rank 0": ["rank 0 waited 10 s", *waits, "next"], "rank 2": waits[:2]}))
    assert page["ended"]["waits"] == waits
    assert page["ended"]["causes"] == ["rank 0 waited 10 s"]


def test_a_repaired_run_shows_detours_and_an_unfinished_one_formulas(hybrid: Path) -> None:
    run = read(hybrid)
    said = ["rank 4 (stage 1 of replica 1) has exited: ranks 0, 1, 2, 3 and 5 go on with step 7, 0.1 s after that"]
    settings = run.settings | {"repair": "exact"}
    repaired = replace(run, config=run.config | {"settings": settings}, logs={"rank 0": said, "rank 1": said})
    assert repaired.dead == {4}
    later = [*said, "ranks 0, 1, 2, 3, 4 and 5 go on with step 9, 0.1 s after that"]
    assert replace(repaired, logs={"rank 0": later}).dead == set(), "a spare has taken the place"
    [row] = contents(repaired)["ended"]["detours"]["rows"]
    assert row == [7, "rank 4 (stage 1 of replica 1)", "0, 1, 2", "rank 1 (stage 1 of replica 0)"]
    said = ["rank 2 was terminated by SIGKILL: ranks 0, 1, 4, 5, 6 and 7 go on with step 7, 0.1 s after that"]
    config = repaired.config | {"layout": {"dp": 2, "pp": 2, "tp": 2}}
    found = detours(replace(repaired, config=config, logs={"rank 0": said}, trace=None, ledger=[]))
    assert found is not None
    pairs = [(dead[:6], numbers, other[:6]) for _, dead, numbers, other in found["rows"]]
    assert pairs == [("rank 2", "0, 1, 2", "rank 6"), ("rank 3", "0, 1, 2", "rank 7")]
    rows = contents(replace(run, ledger=[]))["ledger"]["table"]["rows"]
    assert {kind: each for kind, _, each, *_ in rows if kind in ("activations", "gradients", "loss")} == {
        kind: pytest.approx(formula, abs=1) for kind, _, _, formula, words in rows if formula and words
    }


def test_a_run_repaired_in_its_last_step_shows_the_records_of_the_ranks_that_are_left(tmp_path: Path) -> None:
    flags = (
        f"--n-layers 4 --steps {repairs.STEPS} --optimizer sgd --lr 0.5 --dp 2 --pp 3 --batch-size 3 --trace".split()
    )
    repairs.run_with([(4, repairs.STEPS - 1, 9, "SIGKILL")], tmp_path, "hybrid/intro_hybrid_repair.py", *flags)
    repaired = Event(REPAIR, "rank 4 has exited", 1.0, 2.0)
    ranks = [RankTrace([Event(STEP, "step 5", 0.0, 1.0), repaired])] * 5
    write_chrome(Trace(ranks, {"dp": 2, "pp": 3}, alive=(0, 1, 2, 3, 5)), tmp_path / "trace.json")  # no step after that
    page, held = contents(read(tmp_path, has_ended=True)), json.loads((tmp_path / "memory.json").read_text())
    assert page["status"]["text"] == f"The run is complete: {repairs.STEPS} of {repairs.STEPS} steps, 1 repair."
    assert [name.partition(" (")[0] for name in page["memory"]["ranks"]] == [f"rank {rank}" for rank in (0, 1, 2, 3, 5)]
    for kind, values in page["memory"]["bars"].items():
        assert values == [rank[kind] for rank in held]
    assert page["ledger"]["table"]["caption"] == "Bytes that rank 0 sent (after a repair, no other rank reports)"
    assert (page["timeline"], page["missing"]["timeline"][:42]) == (None, "No step came after the last repair, so the")
    assert write(tmp_path) == tmp_path / "page.html"
    with pytest.raises(InputError, match=r"trace.json: no step came after the last repair"):
        timelines(tmp_path / "timeline.png", [str(tmp_path)])


@pytest.fixture(scope="module")
def further(hybrid: Path) -> Records:
    """A run with a prediction, experts and a ring, which no single short run has."""
    run = read(hybrid)
    parts = {"step": 0.5, "computing": 0.25, "collectives": 0.125, "waiting for messages": 0.125}
    rank = [
        Event(STEP, "step 0", 0.0, 1.0),
        *(Event(PART, f"ring step {n}{way}", n / 4, n / 4 + 0.125) for n in (0, 1) for way in ("", ", backward")),
    ]
    return replace(
        run,
        config=run.config | {"predicted_seconds": parts},
        metrics=[record | {"max_over_mean_load": 1 + step / 64} for step, record in enumerate(run.metrics)],
        trace=Trace([RankTrace(rank), RankTrace(rank[:2])], {"cp": 2}),
    )


def test_predictions_experts_and_rings_are_shown_where_a_run_has_them(hybrid: Path, further: Records) -> None:
    page = contents(read(hybrid))
    assert (page["prediction"], page["experts"], page["ring"]) == (None, None, None)
    page, counted = contents(further), further.metrics[3:]  # as in the comparison that the run prints
    means = [statistics.fmean(r[name] for r in counted) for name in ("seconds", "waited_seconds", "collective_seconds")]
    measured = (means[0], means[0] - means[1], means[2], means[1] - means[2])
    predicted = further.config["predicted_seconds"].items()
    assert page["prediction"]["parts"] == [
        (what, planned, pytest.approx(taken)) for (what, planned), taken in zip(predicted, measured, strict=True)
    ]
    assert (page["experts"]["steps"], page["experts"]["loads"][9]) == ([*range(1, STEPS + 1)], 1 + 9 / 64)
    assert page["ring"]["rows"] == [[0.25, 0.25], [0.125, 0.0]]


def test_the_curves_of_a_long_run_keep_all_validation_losses(alone: Path) -> None:
    record = lines(alone)[0]
    steps = [record | {"step": n} | ({"validation_loss": 1.0} if n % 97 == 96 else {}) for n in range(9700)]
    [curve] = contents(replace(read(alone), metrics=steps))["curves"]["runs"]
    assert curve["values"]["validation_loss"].count(1.0) == 100
    assert 4000 <= len(curve["at"]["steps"]) < 4100
    assert curve["caption"] == f"{len(curve['at']['steps']):,} of 9,700 steps"


def test_it_is_made_at_once_and_small(hybrid: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = run(*LAUNCH, "page", hybrid)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.out == f"# {hybrid / 'page.html'}\n", ended.err
    assert (hybrid / "page.html").stat().st_size < 2e6
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2, "seconds of a core"
    code = "import sys, distlab_page.command; print('torch' in sys.modules)"
    assert run(sys.executable, "-c", code).out == "False\n"


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path, alone: Path) -> None:
    for args, sentence in (
        ([tmp_path], f"# {tmp_path}: this is not a run's folder"),
        ([alone, "--to", tmp_path], f"# {tmp_path}: cannot be written (Is a directory)"),
        ([alone, "--port", "80"], "# --port 80: only --serve listens"),
        ([alone, "--serve", "--port", "70000"], "# --port 70000: a port is a number"),
    ):
        ended = run(*LAUNCH, "page", *args)
        assert (ended.status, ended.out) == (2, "")
        assert ended.err.startswith(sentence), ended.err
        assert ended.err.count("\n") == 1
    (tmp_path / "config.json").write_text((alone / "config.json").read_text())
    (tmp_path / "memory.json").write_text('[{"parameters"')
    with pytest.raises(InputError, match=r"memory.json: this is not a complete record of a run"):
        read(tmp_path)


def test_a_script_element_holds_any_text() -> None:
    assert "<" not in as_script({"name": "</script><!--", "loss": float("nan")})
    assert json.loads(as_script(["</script>", float("inf")])) == ["</script>", None]


def test_the_drawing_library_is_cut_to_what_a_page_draws_with() -> None:
    whole = plotly.get_plotlyjs()
    parts = needed_parts(whole)
    assert len(parts) < len(whole) / 3
    assert whole.startswith(parts[:2000])
    other = whole.replace('name:"heatmap"', 'name:"another"')
    assert needed_parts(other) == other, "all of a script in which the parts are not found"


@pytest.fixture(scope="module", autouse=True)
def heeded_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored if a shell runs pytest with &
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def server(alone: Path) -> Iterator[str]:
    process = start(*LAUNCH, "page", alone, "--serve")
    assert process.stdout is not None
    yield process.stdout.readline().split()[1]
    process.send_signal(signal.SIGINT)
    assert finish(process).status == 130


def test_the_server_answers_this_machine_only(server: str, alone: Path) -> None:
    assert server.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(f"{server}data.json") as answer:
        assert json.load(answer)["curves"] == contents(read(alone))["curves"]
    foreign = urllib.request.Request(server, headers={"Host": "example.org"})
    for request, status in ((foreign, 403), (urllib.request.Request(f"{server}config.json"), 404)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert refused.value.code == status


in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@in_a_browser
@pytest.mark.parametrize("name", ["hybrid", "killed", "two runs", "served", "further panels"])
def test_a_browser_draws_each_number_and_asks_for_nothing(
    name: str, hybrid: Path, alone: Path, killed: Path, further: Records, server: str, browser: Browser, tmp_path: Path
) -> None:
    one, another = read(hybrid), read(alone)
    run, other = {
        "hybrid": (one, None),
        "killed": (read(killed), None),
        "two runs": (one, another),
        "served": (another, None),
        "further panels": (further, None),
    }[name]
    file = tmp_path / "page.html"
    file.write_text(html(run, other))
    address = server if name == "served" else f"file://{file}"
    page, content = browser.open(address), json.loads(as_script(contents(run, other)))
    page.wait_for(DRAWN)
    assert page.console == []
    assert page.requests == [address.replace("%", "%25")], "only the page itself"
    assert page.busy_seconds() < 1, "seconds of a core, until all is drawn"
    assert page.value("+document.body.dataset.drawnMs") > 0

    assert page.value("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the window"

    figures, expected = page.value(FIGURES), in_figures(content)
    assert figures.keys() == expected.keys()
    for panel, drawn in figures.items():
        of_both = [sorted(number for number in of if number is not None) for of in (drawn, expected[panel])]
        assert of_both[0] == pytest.approx(of_both[1]), panel
    palette = {*style.SERIES, style.YELLOW, style.INK, "#bbbbbb"}
    assert {*page.value(COLORS)} <= palette, "colors that color-blind readers can distinguish"
    page.value(OPENED)
    page.wait_for("![...document.querySelectorAll('details tbody')].some(one => !one.childNodes.length)")
    shown, rows = dict(page.value(TABLES)), tables(content)
    for caption, cells in rows.items():
        assert [[as_number(text) for text in row] for row in shown[caption]] == [
            [
                pytest.approx(n, rel=1e-5, abs=0.05 * (abs(n) > 0.1)) if isinstance(n, float) else n
                for n in map(plain, row)
            ]
            for row in cells
        ], caption
    steps = [*range(1, len(run.metrics) + 1)]
    assert [as_number(row[0]) for row in shown[f"{run.name}, all {len(steps)} steps"]] == steps

    texts = page.value(TEXTS)
    assert content["status"]["text"] in texts["top"]
    assert (" %" in texts["timeline"]) == (run.trace is not None)
    if other:
        assert "The same run as one process: losses differ by at most " in texts["top"]
    if run is one:
        assert "hybrid <b>&: 2 dp x 3 pp" in texts["top"]
        assert texts["time"].count(" %") == 4, "the factors of efficiency; all else is in seconds"
    assert page.value("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert "Content Security Policy" in page.console[0], "a page could not ask even if it wanted"


@in_a_browser
def test_a_page_is_read_with_keys_and_on_paper(hybrid: Path, browser: Browser, tmp_path: Path) -> None:
    file, content = tmp_path / "page.html", contents(read(hybrid))["timeline"]
    file.write_text(html(read(hybrid)))
    page = browser.open(f"file://{file}")
    page.wait_for(DRAWN)
    label = "document.querySelector('output').value"
    steps, typical = content["steps"], content["typical"]
    assert page.value(label).startswith(f"{steps[typical]['label']}: ")
    page.value("document.getElementById('step').focus()")
    page.press("ArrowRight" if typical + 1 < len(steps) else "ArrowLeft")
    at = page.value("+document.getElementById('step').value")
    assert abs(at - typical) == 1
    assert page.value(label).startswith(f"{steps[at]['label']}: ")
    page.press("Tab")
    assert page.value("document.activeElement.ariaLabel") == "next step"
    assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"
    page.value("document.querySelector('#timeline details summary').focus()")
    page.press("Enter")
    listed = page.wait_for("document.querySelector('#timeline details[open] table')?.tBodies[0].rows.length")
    assert listed == len(steps[at]["bars"]) + len(steps[at]["arrows"])
    assert "waiting for other ranks" in page.value("document.querySelector('#timeline details').innerText")
    printed = base64.b64decode(page.call("Page.printToPDF")["data"])
    assert printed.startswith(b"%PDF")
    assert page.value("document.querySelectorAll('#time details[open], #schedules details[open]').length") == 3
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.value("getComputedStyle(document.querySelector('nav')).display") == "none"


@in_a_browser
def test_a_served_page_follows_the_run(killed: Path, browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    (folder / "launcher.log").unlink()
    claim, process = Claim(folder), start(*LAUNCH, "page", folder, "--serve")
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split()[1]
        host, _, port = urlsplit(address).netloc.partition(":")
        with socket.create_connection((host, int(port))) as tab:  # one that is closed while it loads
            tab.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            tab.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        page = browser.open(address)
        page.wait_for(DRAWN)
        last = lines(killed)[-1]
        with (folder / "metrics.jsonl").open("a") as metrics:
            print(json.dumps(last | {"step": last["step"] + 1}), file=metrics)
        says = f"The run goes on: {last['step'] + 2:,} of"
        page.value("document.querySelector('#curves summary').focus()")
        page.wait_for(f"document.getElementById('top').innerText.includes({says!r})")
        assert page.value("document.activeElement.closest('section').id") == "curves", "the focus stays"
        assert page.value("document.querySelectorAll('.js-plotly-plot').length") >= 1
    finally:
        process.send_signal(signal.SIGINT)
        ended = finish(process)
        claim.release()
    assert "Traceback" not in ended.err
    assert page.console == []
