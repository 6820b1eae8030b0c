"""What a rank prints, where ranks share a terminal."""

import errno
import io
import itertools
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from support.chapters import records

from distlab.comm.context import context_of
from distlab.comm.recorder import Destination, Ledger, StepTime
from distlab.reports.records import keep_records
from distlab.run.logs import RunLog, human_bytes
from distlab.run.terminal import RankOutput

pytestmark = pytest.mark.quick


def test_a_prefixed_rank_writes_whole_lines_and_says_whose_they_are() -> None:
    terminal = io.StringIO()
    output = RankOutput(terminal, "# rank 2: ")
    output.write("hel")
    output.flush()
    assert terminal.getvalue() == ""
    output.write("lo\n# a remark\nres")
    assert terminal.getvalue() == "# rank 2: hello\n# rank 2: a remark\n"
    output.write("t\n# rank 2 waits\n# rank 20 waits\n")
    assert terminal.getvalue().endswith("# rank 2: rest\n# rank 2 waits\n# rank 2: rank 20 waits\n")


def test_the_log_holds_everything_also_what_came_before_its_file(tmp_path: Path) -> None:
    terminal = io.StringIO()
    output = RankOutput(terminal)
    output.write("before\n")
    with (tmp_path / "rank0.log").open("w", buffering=1) as log:
        output.keep_in(log)
        output.write("after\n")
        output.keep("in the log alone\n")
        output.write("\r50 %")  # a progress bar, which is redrawn often
        assert (tmp_path / "rank0.log").read_text() == "before\nafter\nin the log alone\n"
    assert terminal.getvalue() == "before\nafter\n\r50 %"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_only_a_terminal_that_was_closed_is_done_without(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> int:
        raise OSError(number, os.strerror(number))

    terminal, log = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "write", fail)
    output = RankOutput(terminal)
    output.keep_in(log)
    with nullcontext() if number == errno.EIO else pytest.raises(OSError, match="No space left"):
        print("a loss", file=output)
        print("another", file=output)
    assert log.getvalue() == ("a loss\nanother\n" if number == errno.EIO else "a loss\n")
    monkeypatch.undo()  # or Python 3.13 reports that `output`, which flushes when it is freed, fails once more


def test_keeps_the_records_of_earlier_steps_and_drops_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": %d, "loss": 1.0}\n' % step for step in range(5)]
    rubbish = [b"\0" * 30 + b"\n", b"\xff\xfe\n", b"{}\n", b"[1]\n", b'{"step": null}\n', b"\n"]
    path.write_bytes(b"".join([lines[0], *rubbish, *lines[1:], b'{"step": 1}']))
    with path.open("rb") as being_read:
        keep_records(path, before=3)
        assert being_read.read().endswith(b'{"step": 1}'), "a reader sees all of a file, or of the one before it"
    assert path.read_bytes() == b"".join(lines[:3])


def test_each_record_is_of_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, waits, and also the values of a step that has none, as of losses that are not added up in each step."""
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0, 2.0).__next__)
    context = replace(context_of(), ledger=Ledger(), world_size=2)
    ledger, to = context.ledger, Destination("gradients", "collective", (1,))
    ledger.count(Destination("weights", "send", (1,)), 7)
    log = RunLog(tmp_path, context)
    log.begin(10, "tokens")
    for step in range(2):
        with log.timing_a_step():
            ledger.count(to, 3 + step)
            ledger.waited(0.5 + step, in_collective=True)
            ledger.waited(0.25, in_collective=False)
            if step == 0:
                log.values |= {"loss": 2.0, "grad_norm": 9.0}
        log.record(step)
    first, second = records(tmp_path)
    assert (first["sent_bytes"], second["sent_bytes"]) == ({"gradients": 3}, {"gradients": 4})
    assert (first["waited_seconds"], first["collective_seconds"]) == (0.75, 0.5)
    assert (second["waited_seconds"], second["collective_seconds"]) == (1.75, 1.5)
    assert (second["tokens"], second["seconds"], second["tokens_per_second"]) == (20, 2.0, 5.0)
    assert (first["loss"], first["grad_norm"], second["loss"]) == (2.0, 9.0, None)
    assert "grad_norm" not in second
    account = log.account()
    with Path("/proc/self/status").open() as lines:
        [peak] = [1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    assert 0.99 * peak < account.pop("peak_memory_bytes") < 100 * peak, "more if the process that began it had more"
    sent = [{"kind": "weights", "way": "send", "peers": (1,), "bytes": 7, "messages": 1}]
    sent += [{"kind": "gradients", "way": "collective", "peers": (1,), "bytes": 7, "messages": 2}]
    seconds = {"seconds": 4.0, "waited_seconds": 2.5, "collective_seconds": 2.0}
    assert account == {"rank": 0, "steps": 2, **seconds, "sent": sent}, "of both"


def test_the_summary_is_of_the_steps_that_this_run_has_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of those before the checkpoint that it resumes from."""
    log = RunLog(tmp_path, replace(context_of(), ledger=(ledger := Ledger())))
    for kind, count in (("weights", 1), ("gradients", 2000), ("gradients", 500)):
        ledger.count(Destination(kind, "collective", (1,)), count)
    log.begin(10, "tokens", origin=50)
    log.times += [StepTime(seconds, 0.5, 0.25) for seconds in (1.0, 1.5, 5.0)]
    assert log.speed().split() == ["2", "tokens/s"], "of the last of them"
    log.summary()
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "# 3 steps, 30 tokens in 7.5 s: 4 tokens/s",
        "# median step time: 1.5 s",
        "# rank 0 computed for 6.0 s and waited 1.5 s for other ranks",
        "# rank 0 sent 1 B of weights in 1 message",
        "# rank 0 sent 2.5 kB of gradients in 2 messages",
    ]


def test_long_work_between_steps_is_told_by_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    logs = [RunLog(tmp_path / str(rank), context_of(), rank) for rank in (0, 1)]
    for seconds in (9.0, 12.0):
        for log in logs:
            with log.timing_apart("checkpoints", f"saving for {seconds:.0f} s"):
                now[0] += seconds
    assert capsys.readouterr().out == "# saving for 12 s took 12 s\n"
    assert logs[0].seconds_apart == logs[1].seconds_apart == {"checkpoints": 21}


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_null(loss: float, tmp_path: Path) -> None:
    log = RunLog(tmp_path, context_of())
    log.begin(10, "tokens")
    for more in ({"validation_loss": loss}, {}):
        with log.timing_a_step():
            log.values["loss"] = loss
        log.values |= more
        log.record(0)
    looked, other = records(tmp_path)
    assert looked["loss"] is looked["validation_loss"] is other["loss"] is None
    assert "validation_loss" not in other


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (999_499, "999 kB"),
        (999_999, "1 MB"),
        (16_500_000_000, "16.5 GB"),
        (10**16, "1e+04 TB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
