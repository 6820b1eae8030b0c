"""Runs whose pages are tested: of six ranks, of one process, and of three ranks, one of which is killed."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.page_numbers import STEPS
from support.processes import children, finish, process_of, start_server, wait_for
from support.terminals import fork_launcher

from distlab.comm.recorder import PART, STEP, Event
from distlab.reports.trace import RankTrace, Trace
from distlab_page.contents import contents
from distlab_page.records import Records, read

MODEL = (
    "--dmodel 32 --num-heads 2 --n-layers 4 --seq-len 16 --data sample --device cpu --lr 0.05 --optimizer sgd".split()
)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "hybrid <b>&"  # a name that would be markup
    batch = "--batch-size 3 --micro-batches 3 --eval-every 10 --eval-sequences 4".split()
    flags = *MODEL, *batch, "--steps", STEPS, "--trace", "--page", "--out", out
    ended = fork_launcher("hybrid", *flags).finish()
    assert ended.status == 0, ended.err
    assert f"# the run as a page: {out / 'page.html'}" in ended.out
    assert "The run is complete: " in (out / "page.html").read_text(encoding="utf-8")
    return out


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "alone"
    assert fork_launcher("primer", *MODEL, "--batch-size", 6, "--steps", STEPS, "--out", out).finish().status == 0
    return out


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session", autouse=True)
def heeded_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored if a shell runs pytest with &
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def server(alone: Path, hybrid: Path, heeded_ctrl_c: None) -> Iterator[str]:
    process = start_server("page", alone.parent, hybrid, "--serve")
    assert process.stdout is not None
    yield process.stdout.readline().split()[1]
    process.send_signal(signal.SIGINT)
    assert finish(process).status == 130
