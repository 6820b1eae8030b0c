"""Time slices, as Linux reports them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

REPORT = Path("/proc/self/sched")
ASK = """
import os
from pathlib import Path
from distlab.comm.time_slices import long_time_slices

def report():
    [line] = [line for line in Path("/proc/self/sched").read_text().splitlines() if line.startswith("se.slice ")]
    print(int(line.split(":")[1]), os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))

os.nice(3)
{prepare}
report()
with long_time_slices():
    report()
report()
"""


def reports(prepare: str = "") -> list[list[int]]:
    """Slice in nanoseconds, policy and nice value: before, within and after the context."""
    result = subprocess.run(
        [sys.executable, "-c", ASK.format(prepare=prepare)], capture_output=True, text=True, timeout=60, check=True
    )
    return [[int(number) for number in line.split()] for line in result.stdout.splitlines()]


def has_slices() -> bool:
    version = tuple(int(number) for number in os.uname().release.split(".")[:2]) if sys.platform == "linux" else (0, 0)
    return version >= (6, 12) and REPORT.exists() and "se.slice " in REPORT.read_text()


@pytest.mark.skipif(not has_slices(), reason="Linux gives threads no slice of their own, or does not report it")
def test_a_thread_has_a_long_slice_in_the_context_only_and_nothing_else_changes() -> None:
    before, within, after = reports()
    assert before[0] < within[0] == 10_000_000
    assert before[1:] == within[1:] == [os.SCHED_OTHER, 3]
    assert after == before


@pytest.mark.skipif(not has_slices(), reason="Linux gives threads no slice of their own, or does not report it")
def test_a_policy_of_the_users_is_left_alone() -> None:
    before, within, after = reports("os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))")
    assert before == within == after
    assert before[1:] == [os.SCHED_BATCH, 3]
