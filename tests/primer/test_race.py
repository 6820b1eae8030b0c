"""The race: updates are lost, on two cores and on one, and neither cure loses any."""

import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import RawValue, active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.processes import LAB, run_ranks, wait_for
from support.terminals import fork_python

from simplellm.errors import InputError

sys.path.append(str(LAB))
from primer import race as lesson

ROW = re.compile(r"# (.+?) {2,}([\d,]+) +([\d,]+) +(\d+\.\d\d)")
HAS_GLOBAL_LOCK = getattr(sys, "_is_gil_enabled", lambda: True)()


def rows(out: str) -> list[tuple[str, int, int]]:
    """What was tried, the result and the lost updates of each row of the table."""
    matches = [match for match in map(ROW.fullmatch, out.splitlines()) if match]
    return [(match[1], int(match[2].replace(",", "")), int(match[3].replace(",", ""))) for match in matches]


@pytest.mark.alone
def test_processes_lose_updates_and_the_cures_do_not(tmp_path: Path) -> None:
    # With fewer repeats than by default, threads may end before they change places.
    ended = fork_python("primer/race.py", "--out", tmp_path).finish()
    assert ended.status == 0, ended.err
    assert all(line.startswith("#") for line in ended.out.splitlines())
    *races, lock, own, threads, threads_with_call = rows(ended.out)
    assert [what for what, _, _ in races] == ["processes, one number"] * 3
    assert all(lost > 0 for _, _, lost in races)
    assert len({lost for _, _, lost in races}) > 1, "another number each time"
    assert all(result + lost == 3_000_000 for _, result, lost in rows(ended.out))
    assert lock == ("processes, one number, a lock", 3_000_000, 0)
    assert own == ("processes, a number each, added up", 3_000_000, 0)
    times_as_long = re.search(r"the lock takes ([\d.]+) times as long as a number each", ended.out)
    assert times_as_long
    assert float(times_as_long[1]) > 1
    assert (threads[2] == 0) == HAS_GLOBAL_LOCK
    assert threads_with_call[2] > 0


def lost_on_one_core(rank: int) -> int:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    shared = RawValue("q")
    lesson.side_by_side(lesson.PROCESSES, lesson.add, [(shared, lesson.DEFAULTS.repeats)] * 2, timeout=30)
    return 2 * lesson.DEFAULTS.repeats - shared.value


@pytest.mark.alone
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot keep a process to one core")
def test_two_processes_on_one_core_lose_updates_too() -> None:
    (lost,) = run_ranks(1, lost_on_one_core)
    assert lost > 0


@pytest.mark.skipif(not HAS_GLOBAL_LOCK, reason="these threads would lose updates")
def test_a_race_that_loses_nothing_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lesson, "PROCESSES", lesson.THREADS)
    alone: Any = SimpleNamespace(settings=lesson.RaceSettings(processes=2, repeats=100))
    lesson.race(alone)
    assert capsys.readouterr().out.count("nothing was lost this time") == 3


def end_before_the_work_is_done(number: Any, status: int) -> None:
    os._exit(status)


def refuse_to_wait(rank: int, work: Any, jobs: list[tuple[Any, ...]]) -> None:
    with pytest.raises(InputError, match=f"--timeout 0.5: {work.__name__} takes longer"):
        lesson.side_by_side(lesson.PROCESSES, work, jobs, timeout=0.5)
    assert wait_for(lambda: not active_children(), 5), "what still works is ended"


@pytest.mark.parametrize("work", [end_before_the_work_is_done, time.sleep])
def test_work_that_is_not_done_in_time_ends_the_run(work: Any) -> None:
    jobs = [(60,)] if work is time.sleep else [(RawValue("q"), 0)]
    run_ranks(1, refuse_to_wait, work, jobs, deadline=20)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the processes of a parent that was killed")
def test_no_process_outlives_the_script() -> None:
    script = fork_python("primer/race.py", "--repeats", "1000000000")

    def processes() -> int:
        return len(subprocess.run(["ps", "-o", "pid=", "-s", str(script.pid)], capture_output=True).stdout.split())

    assert wait_for(lambda: processes() >= 4, 30), "itself and three that count"
    os.kill(script.pid, signal.SIGKILL)
    script.wait()
    assert wait_for(lambda: processes() == 0, 30)
