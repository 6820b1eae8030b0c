"""With --tensorboard a run's records are in its folder for TensorBoard too."""

import errno
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.chapters import records, train_on

from distlab.comm.context import context_of
from distlab.run.logs import RunLog
from distlab.settings.training import TrainSettings
from simplellm.errors import InputError


def events_in(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    return EventAccumulator(str(folder)).Reload()


def test_holds_what_the_metrics_hold(tmp_path: Path) -> None:
    flags = "--world-size 2 --batch-size 1 --eval-every 2 --clip-norm 1 --tensorboard".split()
    train_on(2, "DP/gradient_aggr/intro_DP_GA.py", tmp_path, *flags)
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1, "one rank writes"
    events = events_in(tmp_path)
    for name in "loss lr grad_norm validation_loss tokens_per_second peak_memory_bytes".split():
        kept = [(event.step, event.value) for event in events.Scalars(name)]
        steps = [record for record in records(tmp_path) if name in record]
        expected = [(record["step"], pytest.approx(record[name], rel=1e-6)) for record in steps]
        assert kept == expected
        assert kept


def test_steps_that_are_taken_again_are_there_once(tmp_path: Path) -> None:
    for first, last, go_on_at in ((0, 6, None), (3, 8, 3)):
        log = RunLog(tmp_path, context_of(), tensorboard=True)
        log.begin(10, "tokens", continue_at=go_on_at)
        for step in range(first, last):
            with log.timing_a_step():
                log.values["loss"] = 10 * first + step
            log.record(step)
        log.summary()
    kept = [(event.step, event.value) for event in events_in(tmp_path).Scalars("loss")]
    assert kept == [(0, 0), (1, 1), (2, 2), (3, 33), (4, 34), (5, 35), (6, 36), (7, 37)]
    assert [record["step"] for record in records(tmp_path)] == [*range(8)]


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match="pip install tensorboard"):
        TrainSettings(data="sample", tensorboard=True).decide()


def test_a_full_disk_shows_no_traceback_of_the_thread_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    RunLog(tmp_path, context_of(), tensorboard=True).begin(10, "tokens")

    def fail(error: Exception) -> None:
        raise error

    writer = type("Writer", (threading.Thread,), {"__module__": "tensorboard.summary.writer"})
    full, mistake = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ValueError("a mistake")
    for kind, error in ((writer, full), (writer, mistake), (threading.Thread, full)):
        (thread := kind(target=fail, args=(error,))).start()
        thread.join()
    assert [about.exc_value for about in shown] == [mistake, full]
