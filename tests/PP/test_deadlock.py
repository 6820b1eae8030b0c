"""The deadlock chapter: each case hangs for real, is shown and named, and has a cure."""

import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.processes import LAB, Ended, free_port, process_group, run_ranks
from support.terminals import fork_launcher, terminals

sys.path.append(str(LAB))
from PP.deadlock import intro_deadlock as lesson

SCRIPT = "PP/deadlock/intro_deadlock.py"
TIMEOUT = 2
CASES = {  # what the pictures say, and the cycle
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


def check(case: str, ended: Ended) -> None:
    lines, other = CASES[case]
    assert ended.status == 1
    shown = ended.out.replace("# rank 1: ", "# ").replace("# rank 2: ", "# ")  # whoever draws it
    for line in [*lines, f"cycle: rank 0 -> rank {other} -> rank 0"]:
        assert shown.count(line) == 1, ended.out
    place = r"( \(stage \d\))?"
    assert re.fullmatch(
        f"# deadlock: rank 0{place} waits for rank {other}{place}, which waits for rank 0{place}",
        ended.err.splitlines()[-1],
    ), ended.err
    assert "Traceback" not in ended.err
    assert not re.search(r"rank (\d+): rank \1 ", ended.out), "a rank's name once in a line"


def test_under_the_launcher_one_rank_shows_who_waits_for_whom(tmp_path: Path) -> None:
    started = time.monotonic()
    flags = ["--case", "order", "--device", "cpu", "--timeout", str(TIMEOUT), "--out", tmp_path]
    ended = fork_launcher("deadlock", *flags).finish(40)
    assert time.monotonic() - started < TIMEOUT + 20
    check("order", ended)
    assert "# checked before the run: deadlock: stage 0, before B0, waits for" in ended.out
    assert ended.out.count("checked before the run") == 1, "by one rank"


@pytest.mark.parametrize("case", ["both-send", "skipped"])
def test_in_separate_terminals_every_rank_shows_it(case: str, tmp_path: Path) -> None:
    with terminals(SCRIPT, 3, tmp_path, "--case", case, "--device", "cpu", "--timeout", str(TIMEOUT)) as ranks:
        for rank in ranks:
            check(case, rank.finish(TIMEOUT + 20))


def to_the_end(rank: int, port: int, case: Any) -> set[str]:
    settings = lesson.DeadlockSettings(case=case, cure=True)
    run: Any = SimpleNamespace(rank=rank, world_size=3, device=torch.device("cpu"), settings=settings)
    with process_group(rank, 3, port) as context:
        lesson.try_case(run)
    return {kind for kind, sent in context.ledger.sent_bytes.items() if sent}


@pytest.mark.parametrize("case", CASES)
def test_the_cure(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    kinds = set().union(*run_ranks(3, to_the_end, free_port(), case))
    assert kinds == {"both-send": {"tensors"}, "order": {"messages"}, "skipped": {"gradients", "results"}}[case]
    assert capfd.readouterr().out == f"# {case}: all ranks have finished\n"


def test_one_rank_cannot_wait_for_itself() -> None:
    ended = fork_launcher("deadlock", "--world-size", "1").finish()
    assert ended.status == 2
    assert ended.err.splitlines()[-1] == "# rank 0 failed: --world-size 1: a deadlock needs at least 2 ranks"
