"""The records of a rank."""

import time

import pytest

from distlab.comm.recorder import COMPUTE, Recorder


def test_a_rank_that_loses_its_core_while_it_reads_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events are still at the time of day that other ranks read: an arrow must not end before it starts."""
    time_of_day, readings = time.time, 0

    def interrupted() -> float:
        nonlocal readings
        readings += 1
        now = time_of_day()
        if readings == 1:
            time.sleep(0.02)
        return now

    monkeypatch.setattr(time, "time", interrupted)
    recorder = Recorder()
    recorder.add(COMPUTE, "F0", time.perf_counter())
    recorder.keeps(8)
    assert not recorder.events, "not yet enabled"
    assert not recorder.kept_bytes
    recorder.enabled = True
    before = time_of_day()
    recorder.add(COMPUTE, "F0", time.perf_counter())
    recorder.keeps(8)
    (event,), ((kept_at, _),) = recorder.events, recorder.kept_bytes
    for at in (event.start, event.end, kept_at):
        assert before - 0.005 < at < time_of_day() + 0.005
