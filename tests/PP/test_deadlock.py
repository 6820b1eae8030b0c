"""The deadlock chapter: each case hangs for real, is shown and named, and has a cure."""

import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import LAB, finish, free_port, process_group, run, run_ranks, start

from simplellm.errors import InputError

sys.path.append(str(LAB))
from PP.deadlock import intro_deadlock as lesson

SCRIPT = "PP/deadlock/intro_deadlock.py"
TIMEOUT = 4
CASES = {  # what the pictures say, and the circle
    "both-send": (["rank 0  waits to send the tensor  -> rank 1", "rank 1  waits to send the tensor  -> rank 0"], 1),
    "order": (
        [
            "rank 0 (stage 0)  waits for the gradients of micro-batch 0  -> rank 1",
            "rank 1 (stage 1)  waits for the activations of micro-batch 1  -> rank 0",
            "rank 2 (stage 2)  waits for the activations of micro-batch 1  -> rank 1",
        ],
        1,
    ),
    "skipped": (
        [
            "rank 0  waits for the gradients of step 2  -> rank 2",
            "rank 1  waits for the gradients of step 2  -> rank 2",
            "rank 2  waits to send the result  -> rank 0",
        ],
        2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_deadlock_ends_with_who_waits_for_whom(case: str, tmp_path: Path) -> None:
    lines, other = CASES[case]
    started = time.monotonic()
    flags = ["--case", case, "--device", "cpu", "--timeout", str(TIMEOUT), "--out", tmp_path]
    ended = run("./launch.sh", "deadlock", *flags, deadline=40)
    assert time.monotonic() - started < TIMEOUT + 20
    assert ended.status == 1
    shown = ended.out.replace("# rank 1: ", "# ").replace("# rank 2: ", "# ")  # whoever draws it
    for line in [*lines, f"a circle: rank 0 -> rank {other} -> rank 0"]:
        assert shown.count(line) == 1, ended.out
    place = r"( \(stage \d\))?"
    assert re.fullmatch(
        f"# deadlock: rank 0{place} waits for rank {other}{place}, which waits for rank 0{place}",
        ended.err.splitlines()[-1],
    ), ended.err
    assert "Traceback" not in ended.err
    if case == "order":
        assert "# checked before the run: deadlock: stage 0, before B0, waits for" in ended.out


def to_the_end(rank: int, port: int, case: str) -> bool:
    run: Any = SimpleNamespace(rank=rank, world_size=3, settings=lesson.DeadlockSettings(case=case, cure=True))
    with process_group(rank, 3, port):
        lesson.try_case(run)
    return True


@pytest.mark.parametrize("case", CASES)
def test_the_cure(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert all(run_ranks(3, to_the_end, free_port(), case))
    assert capfd.readouterr().out == f"# {case}: all ranks have come to the end\n"


def test_in_separate_terminals_every_rank_shows_it(tmp_path: Path) -> None:
    flags = ["--case", "skipped", "--device", "cpu", "--timeout", str(TIMEOUT), "--out", tmp_path]
    port = str(free_port())
    ranks = [start(sys.executable, SCRIPT, str(rank), "--master-port", port, *flags) for rank in range(3)]
    for ended in [finish(rank, deadline=40) for rank in ranks]:
        assert ended.status == 1
        assert "#   a circle: rank 0 -> rank 2 -> rank 0" in ended.out
        assert ended.err.splitlines()[-1] == "# deadlock: rank 0 waits for rank 2, which waits for rank 0"


def test_a_world_of_one_has_nobody_to_wait_for() -> None:
    with pytest.raises(InputError, match="--world-size 1: waiting for each other takes at least 2"):
        lesson.DeadlockSettings(world_size=1).check()
