"""The page of a run: its numbers are those of the records, and a browser draws it without any other file."""

import json
import os
import re
import shutil
import signal
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.browser import CHROMIUM, open_page
from support.processes import Ended, children, finish, process_of, run, start, wait_for

from distlab.comm.recorder import PART, STEP, Event
from distlab.reports.trace import RankTrace, Trace
from distlab.settings.folders import Claim
from distlab_page.contents import contents
from distlab_page.records import read
from distlab_page.writing import as_script, html
from simplellm.errors import InputError

pytest.importorskip("plotly", reason="pages need plotly: pip install plotly")

MODEL = (
    "--dmodel 32 --num-heads 2 --n-layers 4 --seq-len 32 --data sample --device cpu --lr 0.1 --optimizer sgd".split()
)
LAUNCH = sys.executable, "-m", "distlab.launch"
STEPS = 50
PANELS = "layout curves timeline schedules time ledger memory ended".split()


def launch(*args: object) -> Ended:
    ended = run(*LAUNCH, *args, deadline=120)
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
    launcher = start(*LAUNCH, "dp-ga", *MODEL, "--steps", 100_000, "--timeout", 10, "--out", out)
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


def raw(path: Path) -> Any:
    return json.loads(path.read_text())


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_curves_are_the_records_of_the_steps(hybrid: Path, alone: Path) -> None:
    shown = contents(read(hybrid), read(alone))["curves"]["runs"]
    for folder, curve in zip((hybrid, alone), shown, strict=True):
        records = lines(folder)
        assert len(records) == STEPS == len(curve["at"]["steps"])
        for name, values in curve["values"].items():
            assert values == [record.get(name) for record in records], name
        assert curve["at"]["tokens"] == [record["tokens"] for record in records]
        assert curve["at"]["seconds"][-1] == pytest.approx(sum(record["seconds"] for record in records))
    assert [value is not None for value in shown[0]["values"]["validation_loss"]].count(True) == 2


def test_a_run_is_the_same_as_one_process_or_says_what_differs(hybrid: Path, alone: Path, killed: Path) -> None:
    page = contents(read(hybrid), read(alone))["verdict"]
    most = max(abs(a["loss"] - b["loss"]) for a, b in zip(lines(hybrid), lines(alone), strict=True))
    assert (page["is_same"], page["most"], page["steps"]) == (True, most, STEPS)
    assert page["text"] == f"The same run as one process: losses differ by at most {most:.2g} over 50 steps."
    other = contents(read(killed), read(alone))["verdict"]
    assert other["is_same"] is None
    assert "tokens in a step 96 and 384" in other["text"]


def test_the_ledger_has_the_bytes_of_each_rank_and_their_formulas(hybrid: Path) -> None:
    accounts = raw(hybrid / "ledger.json")
    page = contents(read(hybrid))["ledger"]
    sent = [Counter[str]() for _ in accounts]
    for account, total in zip(accounts, sent, strict=True):
        for way in account["sent"]:
            total[way["kind"]] += way["bytes"]
    rows = page["table"]["rows"]
    shown = sorted((int(rank), row[0], row[3]) for row in rows for rank in row[1].split(", "))
    assert shown == sorted((rank, kind, size) for rank, total in enumerate(sent) for kind, size in total.items())
    of_rank_0 = Counter[str]()
    for record in lines(hybrid):
        of_rank_0.update(record["sent_bytes"])
    for kind in ("activations", "gradients"):
        assert sent[0][kind] == of_rank_0[kind] > 0
    with_formula = [row for row in rows if row[5] is not None]
    assert {row[0] for row in with_formula} == {"activations", "gradients of activations", "gradients", "loss"}
    assert {rank for row in with_formula for rank in row[1].split(", ")} == set("012345")
    for row in with_formula:
        assert row[4] == pytest.approx(row[5], abs=1), row
    for sender, line in enumerate(page["matrix"]):
        assert sum(line) == pytest.approx(sum(sent[sender].values()))
    forward = page["kinds"][0][1]  # from the first stage to the second
    assert dict(map(tuple, forward))["activations"] == sent[0]["activations"]


def test_memory_is_beside_the_plan(hybrid: Path) -> None:
    held, page = raw(hybrid / "memory.json"), contents(read(hybrid))["memory"]
    for kind, values in page["bars"].items():
        assert values == [rank[kind] for rank in held]
    for kind in ("parameters", "gradients"):
        assert page["plan"][kind] == page["bars"][kind]
    for values, planned in zip(page["bars"]["activations"], page["plan"]["activations"], strict=True):
        assert planned == pytest.approx(values, rel=0.05)


def test_the_timeline_and_the_time_spent_are_the_trace(hybrid: Path) -> None:
    events = [event for event in raw(hybrid / "trace.json")["traceEvents"] if event["ph"] == "X"]
    page = contents(read(hybrid))
    timeline, recorded = page["timeline"], Counter[tuple[int, str, float]]()
    for event in events:
        recorded[event["pid"], event["name"], round(event["dur"] / 1e3, 3)] += 1
    bars = [bar for step in timeline["steps"] for bar in step["bars"]]
    assert len(bars) > 500
    for rank, _, name, _, length in bars:
        found = [recorded[rank, timeline["names"][name], round(length + off, 3)] for off in (-0.001, 0, 0.001)]
        assert sum(found), (rank, timeline["names"][name], length)
    arrows = [arrow for step in timeline["steps"] for arrow in step["arrows"]]
    assert arrows
    assert all(sent <= arrived for _, sent, _, arrived, _ in arrows)

    first = min(event["ts"] for event in events if event["name"] == "step 1")
    for rank, row in enumerate(page["time"]["rows"]):
        own = [event for event in events if event["pid"] == rank and event["ts"] >= first - 1]
        taken = {
            kind: sum(e["dur"] for e in own if e["cat"] == kind) / 1e6 for kind in ("compute", "wait", "send", "step")
        }
        assert row[0] == pytest.approx(taken["compute"], rel=0.02)
        assert row[1] == pytest.approx(taken["wait"])
        assert 0 < row[2] <= taken["send"]
        assert sum(row) == pytest.approx(taken["step"])
        assert row[3] >= 0
    factors = [row[1] for row in page["time"]["factors"]["table"]["rows"]]
    assert factors[0] * factors[1] * factors[2] == pytest.approx(factors[3])
    assert all(0 < factor <= 1.01 for factor in factors)


def test_a_run_that_ended_early_says_so_and_why(killed: Path) -> None:
    page = contents(read(killed))
    steps = lines(killed)[-1]["step"] + 1
    assert page["status"]["state"] == "ended early"
    assert page["status"]["text"].startswith(f"The run ended early, after {steps:,} of 100,000 steps. ")
    assert any("rank 1" in cause for cause in page["ended"]["causes"]), page["ended"]
    sums = [
        sum(record[name] for record in lines(killed)) for name in ("seconds", "waited_seconds", "collective_seconds")
    ]
    assert page["time"]["rows"] == [pytest.approx((sums[0] - sums[1], sums[1] - sums[2], sums[2]))]


def test_predictions_experts_and_rings_are_shown_where_a_run_has_them(hybrid: Path, tmp_path: Path) -> None:
    run = read(hybrid)
    assert (contents(run)["prediction"], contents(run)["experts"], contents(run)["ring"]) == (None, None, None)
    parts = {"step": 0.5, "computing": 0.25, "collectives": 0.125, "waiting for messages": 0.125}
    loads = [1 + step / 64 for step in range(STEPS)]
    steps = [record | {"max_over_mean_load": load} for record, load in zip(run.metrics, loads, strict=True)]
    rank = [
        Event(STEP, "step 0", 0.0, 1.0),
        *(Event(PART, f"ring step {n}{way}", n / 4, n / 4 + 0.125) for n in (0, 1) for way in ("", ", backward")),
    ]
    ring = Trace([RankTrace(rank), RankTrace(rank[:2])], {"cp": 2})
    page = contents(replace(run, config=run.config | {"predicted_seconds": parts}, metrics=steps, trace=ring))
    counted = run.metrics[3:]  # as in the comparison that the run prints
    means = [statistics.fmean(r[name] for r in counted) for name in ("seconds", "waited_seconds", "collective_seconds")]
    measured = (means[0], means[0] - means[1], means[2], means[1] - means[2])
    shown = [
        (what, predicted, pytest.approx(taken))
        for (what, predicted), taken in zip(parts.items(), measured, strict=True)
    ]
    assert page["prediction"]["parts"] == shown
    assert (page["experts"]["steps"], page["experts"]["loads"]) == ([*range(1, STEPS + 1)], loads)
    assert page["ring"]["rows"] == [[0.25, 0.25], [0.125, 0.0]]


def test_it_is_made_at_once_and_small(hybrid: Path) -> None:
    began = time.perf_counter()
    ended = run(*LAUNCH, "page", hybrid)
    taken = time.perf_counter() - began
    assert ended.out == f"# {hybrid / 'page.html'}\n", ended.err
    assert (hybrid / "page.html").stat().st_size <= 6e6
    assert taken < 4, "two seconds on a quiet machine"
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


@in_a_browser
@pytest.mark.parametrize("name", ["hybrid", "killed", "two runs", "served"])
def test_a_browser_draws_each_panel_without_an_error(
    name: str, hybrid: Path, alone: Path, killed: Path, server: str, tmp_path: Path
) -> None:
    folders = {"hybrid": (hybrid, None), "killed": (killed, None), "two runs": (hybrid, alone), "served": (alone, None)}
    run, other = folders[name]
    page = tmp_path / "page.html"
    page.write_text(html(read(run), read(other) if other else None))
    opened = open_page(server if name == "served" else f"file://{page}", tmp_path / "browser")
    assert opened.console == []
    panels = PANELS if run == hybrid else [panel for panel in PANELS if panel not in ("schedules",)]
    assert [*opened.texts] == ["top", *panels]
    figures = {"layout", "curves", "time"} | ({"timeline", "ledger", "memory"} if run == hybrid else set())
    figures |= {"memory"} if run == alone else set()
    assert {panel for panel, count in opened.drawn.items() if count} == figures
    assert contents(read(run))["status"]["text"] in opened.text("top")
    if other:
        assert "The same run as one process: losses differ by at most " in opened.text("top")
    if run == hybrid:
        assert "hybrid <b>&: 2 dp x 3 pp" in opened.text("top")
        rows = contents(read(run))["schedules"]["table"]["rows"]
        assert all(row[0] in opened.text("schedules") for row in rows)
        assert opened.text("time").count(" %") == 4, "the factors of efficiency; all else is in seconds"
        assert opened.text("timeline").count(" %") >= 3 * 6


@in_a_browser
def test_a_served_page_follows_the_run(killed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    (folder / "launcher.log").unlink()
    record, over = lines(killed)[-1], threading.Event()

    def go_on() -> None:
        with (folder / "metrics.jsonl").open("a") as metrics:
            while not over.wait(0.05):
                record["step"] += 1
                print(json.dumps(record), file=metrics, flush=True)

    claim, writer = Claim(folder), threading.Thread(target=go_on)
    process = start(*LAUNCH, "page", folder, "--serve")
    assert process.stdout is not None
    address = process.stdout.readline().split()[1]
    writer.start()
    try:
        opened = open_page(address, tmp_path / "browser")
    finally:
        over.set()
        writer.join()
        process.send_signal(signal.SIGINT)
        finish(process)
        claim.release()
    assert opened.console == []
    assert opened.text("top").count("The run goes on: ") == 1
    [shown] = re.findall(r"The run goes on: ([\d,]+) of", opened.text("top"))
    assert int(shown.replace(",", "")) > opened.content["status"]["steps"], "more than when it was loaded"
    assert sum(opened.drawn.values()) > 2
