"""A pipeline with a stage that has stopped or died: every rank that waits says for what, from whom and how long."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Ended, finish, free_port, start

TINY = "--dmodel 16 --num-heads 2 --n-layers 3 --seq-len 16 --data sample --device cpu --steps 1000000".split()
SCRIPTS = {
    "naive": "PP/1F1B/intro_PP_1F1B.py",
    "dapple": "PP/microbatches/intro_PP_microbatches.py",
}
TIMEOUT = 5
# What is missing while stage 1 does nothing: its message, its taking one, or its part in the loss of all.
WAITED_FOR = (
    r"(the .+ from rank 1 \(stage 1\)|rank 1 \(stage 1\) to take the .+|the loss of step \d+ from ranks \d and \d)"
)


def wait_for_steps(out: Path) -> None:
    """Return when the run is well under way."""
    for _ in range(600):
        time.sleep(0.05)
        if (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text().splitlines()) > 3:
            return
    raise AssertionError("no steps")


@pytest.fixture(params=SCRIPTS)
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> "Iterator[list[subprocess.Popen[str]]]":
    """Three stages, started as in three terminals, that train for ever."""
    flags = [*TINY, "--timeout", str(TIMEOUT), "--master-port", str(free_port()), "--out", str(tmp_path)]
    ranks = [start(sys.executable, SCRIPTS[request.param], str(rank), *flags) for rank in range(3)]
    wait_for_steps(tmp_path)
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.communicate()


def test_a_stopped_stage(pipeline: "list[subprocess.Popen[str]]") -> None:
    os.kill(pipeline[1].pid, signal.SIGSTOP)
    stopped = time.monotonic()
    ended = [finish(pipeline[rank], deadline=TIMEOUT + 10) for rank in (0, 2)]
    assert time.monotonic() - stopped < TIMEOUT + 4
    waits = []
    for rank, end in zip((0, 2), ended, strict=True):
        assert end.status == 1
        match = re.fullmatch(
            rf"# rank {rank} \(stage {rank}\) waited (\d+\.\d) s for {WAITED_FOR}: (no answer|a rank has ended).*",
            end.err.splitlines()[-1],
        )
        assert match, end.err
        waits.append(float(match[1]))
    assert TIMEOUT <= max(waits) < TIMEOUT + 1


def test_a_killed_stage(pipeline: "list[subprocess.Popen[str]]") -> None:
    pipeline[1].kill()
    for rank in (0, 2):
        end = finish(pipeline[rank], deadline=TIMEOUT)
        assert end.status == 1
        sentence = end.err.splitlines()[-1]
        assert sentence.startswith(f"# rank {rank} (stage {rank}) waited "), sentence
        assert sentence.endswith("a rank has ended and closed its connection"), sentence


def test_a_stopped_stage_under_the_launcher(tmp_path: Path) -> None:
    process = start("./launch.sh", "pp-dapple", *TINY, "--timeout", str(TIMEOUT), "--out", str(tmp_path))
    wait_for_steps(tmp_path)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    stage_1 = next(pid for pid in map(int, children) if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(stage_1, signal.SIGSTOP)
    stopped = time.monotonic()
    ended: Ended = finish(process, deadline=40)
    assert time.monotonic() - stopped < TIMEOUT + 15
    assert ended.status == 1
    assert re.match(
        rf"# rank [02] failed: rank [02] \(stage [02]\) waited 5\.\d s for {WAITED_FOR}: no answer",
        ended.err.splitlines()[-1],
    ), ended.err
    assert not Path(f"/proc/{stage_1}").exists()
