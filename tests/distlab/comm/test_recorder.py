"""The records of a rank."""

import re
import time
from multiprocessing.synchronize import Barrier

import pytest
from support.processes import free_port, join, meeting_of, run_ranks

from distlab.comm.recorder import COMPUTE, Recorder
from distlab.comm.waits import TrafficError
from distlab.run.tracing import gather_traces


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


def gather_in_vain(rank: int, port: int, meeting: Barrier) -> str:
    """What rank 0 says when it waits for the trace of rank 1, which sends none."""
    context, said = join(rank, 2, port), ""
    if rank == 0:
        context.waits.timeout_seconds = 0.3
        with pytest.raises(TrafficError) as caught:
            gather_traces(context)
        said = str(caught.value)
    meeting.wait(20)
    return said


def test_a_rank_whose_trace_does_not_come_is_named() -> None:
    said, _ = run_ranks(2, gather_in_vain, free_port(), meeting_of(2))
    assert re.search(r"rank 0 waited \d+\.\d s for the trace of rank 1 from rank 1", said), said
