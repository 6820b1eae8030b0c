"""Time slices, as Linux reports them."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.pipeline_models import LOSS, OPTIONS, VOCAB, WIDTH, batch

from distlab.comm.grid import Grid
from distlab.comm.time_slices import SCHED_SETATTR, SLICE_SECONDS, long_time_slices
from distlab.pipeline.executor import Pipeline
from distlab.pipeline.schedules import all_stages
from distlab.pipeline.stages import build_stage

pytestmark = pytest.mark.quick

LONG = int(SLICE_SECONDS * 1e9)


def own_slice() -> int:
    """Of this thread, in nanoseconds; 0 if Linux does not report it."""
    report = Path("/proc/thread-self/sched")
    lines = report.read_text().splitlines() if report.exists() else []
    return next((int(line.split(":")[1]) for line in lines if line.startswith("se.slice ")), 0)


def has_slices() -> bool:
    if sys.platform != "linux" or platform.machine() not in SCHED_SETATTR:
        return False
    version = tuple(int(number) for number in os.uname().release.split(".")[:2])
    return version >= (6, 12) and 0 < own_slice() < LONG


needs_slices = pytest.mark.skipif(not has_slices(), reason="Linux gives no thread a slice of its own, or not shorter")


@contextmanager
def policy(number: int) -> Iterator[None]:
    """In this context, this thread has a scheduling policy."""
    before = os.sched_getscheduler(0)
    os.sched_setscheduler(0, number, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


@needs_slices
def test_a_thread_has_a_long_slice_in_the_context_only() -> None:
    before = own_slice()
    within = []

    def fail() -> None:
        with long_time_slices():
            within.append(own_slice())
            raise ValueError("within")

    with policy(os.SCHED_OTHER), pytest.raises(ValueError, match="within"):
        fail()
    assert within == [LONG]
    assert own_slice() == before


@needs_slices
def test_a_users_policy_and_nice_value_are_left_alone() -> None:
    code = """
import os
from distlab.comm.time_slices import long_time_slices

nice = os.nice(1)
for policy in os.SCHED_OTHER, os.SCHED_BATCH:
    os.sched_setscheduler(0, policy, os.sched_param(0))
    with long_time_slices():
        assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == (policy, nice)
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == (policy, nice)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    with policy(os.SCHED_BATCH):
        before = own_slice()
        with long_time_slices():
            assert own_slice() == before


def test_a_system_that_does_not_tell_its_policy_keeps_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getscheduler", refuse, raising=False)
    before = own_slice()
    with long_time_slices():
        assert own_slice() == before


@needs_slices
def test_a_stage_has_long_slices_during_its_actions() -> None:
    seen: list[int] = []
    net = build_stage(0, (1,), VOCAB, **OPTIONS)
    net.register_forward_pre_hook(lambda *_: seen.append(own_slice()))
    pipeline = Pipeline(net, all_stages("gpipe", 1, 2), Grid(0, dp=1, pp=1), LOSS, WIDTH)
    before = own_slice()
    with policy(os.SCHED_OTHER):
        pipeline.step(batch(0).chunk(2))
    assert seen == [LONG, LONG]
    assert own_slice() == before
