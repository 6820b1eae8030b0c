"""`launch.sh --max-restarts`: all start again from the last checkpoint, and the run is that of no failure."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chapters import losses
from processes import LAB, finish, start

SHAPE = "--data sample --dmodel 32 --num-heads 2 --n-layers 2 --seq-len 24 --steps 30".split()
LAUNCH = (LAB / "launch.sh", "dp-ga", "--world-size", "2", *SHAPE)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("undisturbed")
    ended = finish(start(*LAUNCH, "--out", out), deadline=60)
    assert ended.status == 0, ended.err
    return losses(out)


def steps_taken(out: Path) -> int:
    return len((out / "metrics.jsonl").read_bytes().splitlines()) if (out / "metrics.jsonl").exists() else 0


def await_that(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_rank(rank: int, launcher: "subprocess.Popen[str]") -> None:
    """SIGKILL to one of the ranks that a launcher has started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    mine = [
        pid for pid in children if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    assert len(mine) == 1
    os.kill(int(mine[0]), signal.SIGKILL)


def test_the_losses_are_those_of_an_undisturbed_run(expected: list[float], tmp_path: Path) -> None:
    """Killed twice: after the first checkpoint, and again after the second."""
    process = start(*LAUNCH, "--save-every", "10", "--max-restarts", "2", "--out", tmp_path)
    for steps in (14, 24):
        await_that(lambda steps=steps: steps_taken(tmp_path) >= steps)  # type: ignore[misc]
        kill_rank(1, process)
        await_that(lambda steps=steps: steps_taken(tmp_path) < steps or process.poll() is not None)  # type: ignore[misc]
    ended = finish(process, deadline=60)
    assert ended.status == 0, ended.err
    assert losses(tmp_path) == expected
    for line in (
        "# a rank has failed: starting all ranks again, 1 of 2 times\n",
        f"# going on from {tmp_path}/checkpoints/step-00000010, after 10 steps\n",
        "# a rank has failed: starting all ranks again, 2 of 2 times\n",
        f"# going on from {tmp_path}/checkpoints/step-00000020, after 20 steps\n",
    ):
        assert line in ended.out


def test_without_a_checkpoint_the_run_begins_again_and_ends_when_restarts_are_used_up(tmp_path: Path) -> None:
    process = start(*LAUNCH, "--steps", "1000000", "--max-restarts", "1", "--out", tmp_path)
    for _ in range(2):
        await_that(lambda: steps_taken(tmp_path) >= 5)
        kill_rank(0, process)
        await_that(lambda: steps_taken(tmp_path) < 5 or process.poll() is not None)
    ended = finish(process, deadline=30)
    assert ended.status == 1
    assert ended.err.splitlines()[-1] == "# rank 0 failed: it was ended by SIGKILL"
    assert "going on from" not in ended.out
    assert ended.out.count("\n0 ") == 2


def test_less_than_none_is_refused() -> None:
    ended = finish(start(*LAUNCH, "--max-restarts", "-1"), deadline=30)
    assert (ended.status, ended.err) == (2, "# --max-restarts -1: give 0 or more\n")
