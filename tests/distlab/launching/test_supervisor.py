"""This machine's ranks as processes: what they are told, how their failures are found, how they end."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from support.processes import children, ranks_of, wait_for

from distlab.launching.forks import fork_ranks
from distlab.launching.nodes import ElsewhereError, NodeRendezvous
from distlab.launching.processes import RankFailure
from distlab.launching.supervisor import TerminatedError, raise_signal, supervise
from distlab.machine.processes import NEWCOMER, is_stopped


class Rounds:
    """A rendezvous of two machines, as the second one sees it; the ranks of the first one have the numbers 0 to 2."""

    def __init__(self) -> None:
        self.starts = self.asked = 0
        self.others_failed = lambda: False

    @property
    def restarts(self) -> int:
        return self.starts - 1

    def allow_restart(self) -> None: ...

    def next_round(self) -> list[dict[str, str]]:
        self.starts += 1
        return [{"RANK": str(3 + local), "LOCAL_RANK": str(local)} for local in range(2)]

    def has_next_round(self) -> bool:
        return self.starts == 1 and self.others_failed()

    def all_finished(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def check_others(self) -> None:
        pass


def run(
    program: str, folder: Path, rounds: Rounds, max_restarts: int = 0, forks: bool = True, repairs: Any = None
) -> dict[int, RankFailure]:
    """Run a program on two ranks."""
    script, errors = folder / "program.py", folder / "errors"
    script.write_text("import json, os, pathlib, signal, sys, time\nfolder = pathlib.Path(sys.argv[1])\n" + program)
    errors.mkdir()
    command = [str(script), str(folder)]
    ranks = fork_ranks(command, 2 if forks else 0)
    return supervise(command, cast(NodeRendezvous, rounds), max_restarts, errors, ranks, repairs)


@pytest.mark.parametrize("forks", [True, False])
def test_ranks_have_numbers_and_sessions_and_finish_when_all_machines_have(
    forks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "9")  # of the launcher, which another one has started
    tells = "(folder / os.environ['RANK']).write_text(os.environ['LOCAL_RANK'] + str(os.getsid(0) == os.getpid()))"
    rounds = Rounds()
    assert run(tells, tmp_path, rounds, forks=forks) == {}
    assert [(tmp_path / rank).read_text() for rank in ("3", "4")] == ["0True", "1True"]
    assert (rounds.starts, rounds.asked) == (1, 2)


FAILS = """
if os.environ["RANK"] == "4":
    record = {{"message": "rank 4 failed: nan", "timestamp": 5, "names_rank": True, "recurs_on_restart": {recurs}}}
    pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record))
    sys.exit(7)
time.sleep(60)
"""


@pytest.mark.parametrize(("recurs", "starts"), [(False, 3), (True, 1)])
def test_ranks_start_again_unless_the_failure_would_recur(recurs: bool, starts: int, tmp_path: Path) -> None:
    rounds = Rounds()
    failures = run(FAILS.format(recurs=recurs), tmp_path, rounds, max_restarts=2)
    assert rounds.starts == starts
    assert [(rank, failure.status) for rank, failure in failures.items()] == [(4, 7), (3, -signal.SIGTERM)]
    assert (failures[4].timestamp, failures[4].cause) == (5, "failed: nan")
    assert not failures[3].record


class TooEarlyToRepair:
    """The repairs of a run of which some ranks have yet to begin to train."""

    is_too_early = True

    def begin(self, *_: object) -> None: ...

    def look(self) -> None: ...


LOSES_A_PEER = """
pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": "", "lost_a_peer": True}))
sys.exit(7)
"""


@pytest.mark.parametrize(("dies", "starts"), [("os.kill(os.getpid(), 9)", 4), (LOSES_A_PEER, 4), ("sys.exit(7)", 1)])
def test_ranks_that_cannot_be_repaired_yet_start_again_if_one_was_killed(
    dies: str, starts: int, tmp_path: Path
) -> None:
    rounds = Rounds()
    rounds.ranks_store = None  # type: ignore[attr-defined]
    assert run(dies, tmp_path, rounds, repairs=TooEarlyToRepair())
    assert rounds.starts == starts


def test_a_failure_on_another_machine_starts_ranks_again_that_have_finished(tmp_path: Path) -> None:
    rounds = Rounds()
    rounds.others_failed = (tmp_path / "finished").exists
    program = """
if os.environ["RANK"] == "3":
    (folder / "starts").open("a").write("x")
    (folder / "finished").touch()
"""
    assert run(program, tmp_path, rounds, max_restarts=1) == {}
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_run_that_has_ended_on_another_machine_ends_the_ranks_here(tmp_path: Path) -> None:
    rounds = Rounds()

    def check_others() -> None:
        if (tmp_path / "begun").exists():
            raise ElsewhereError("on another machine, node 0, rank 1 failed")

    rounds.check_others = check_others  # type: ignore[method-assign]
    with pytest.raises(ElsewhereError):
        run("(folder / 'begun').touch()\ntime.sleep(10)\n(folder / 'ended').touch()", tmp_path, rounds)
    assert not (tmp_path / "ended").exists()


def test_half_a_record_is_none(tmp_path: Path) -> None:
    dies = "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"message\": ')\nos.kill(os.getpid(), 9)"
    before = int(time.time())
    for failure in run(dies, tmp_path, Rounds()).values():
        assert (failure.status, failure.record) == (-signal.SIGKILL, {})
        assert failure.timestamp >= before


def test_a_rank_that_does_not_react_ends_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.launching.processes.SECONDS_TO_END", 1)
    ignores = """
if os.environ["RANK"] == "3":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "ignores").touch()
    time.sleep(60)
while not (folder / "ignores").exists():
    time.sleep(0.05)
sys.exit(1)
"""
    started = time.monotonic()
    failures = run(ignores, tmp_path, Rounds())
    assert time.monotonic() - started < 15
    assert {rank: failure.status for rank, failure in failures.items()} == {3: -signal.SIGKILL, 4: 1}


def test_ranks_are_sent_the_signal_that_ends_the_launcher_and_a_second_one_ends_them_at_once(tmp_path: Path) -> None:
    waits = """
def note(number, _):
    (folder / f"{os.environ['RANK']} {number}").touch()
signal.signal(signal.SIGHUP, note)
(folder / os.environ["RANK"]).write_text(str(os.getpid()))
while True:
    time.sleep(60)
"""
    signalled = [tmp_path / f"{rank} {signal.SIGHUP.value}" for rank in (3, 4)]

    def send_two() -> None:
        for files in ([tmp_path / "3", tmp_path / "4"], signalled):
            assert wait_for(lambda files=files: all(file.exists() for file in files))  # type: ignore[misc]
            os.kill(os.getpid(), signal.SIGHUP)

    sender = threading.Thread(target=send_two)
    started = time.monotonic()
    sender.start()
    before = signal.signal(signal.SIGHUP, raise_signal)
    try:
        with pytest.raises(TerminatedError, match="terminated by SIGHUP"):
            run(waits, tmp_path, Rounds(), forks=False)
    finally:
        signal.signal(signal.SIGHUP, before)
    sender.join()
    assert time.monotonic() - started < 30
    for rank in ("3", "4"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / rank).read_text()), 0)


def test_of_a_spare_that_has_exited_the_cause_is_known_and_one_that_is_stopped_is_killed(tmp_path: Path) -> None:
    program = f"""
import json, os, signal, sys
if os.environ["{NEWCOMER}"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
json.dump({{"message": "a bad row"}}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
sys.exit(1)
"""
    ranks, causes = ranks_of(tmp_path, program), dict[int, str]()
    ranks.start([])
    for number in (1, 2):
        ranks.start_spare(number, {})

    def have_exited() -> bool:
        ranks.kill_stopped()
        causes.update({number: failure.cause for number, failure in ranks.exited_spares().items()})
        return len(causes) == 2

    try:
        assert wait_for(have_exited)
    finally:
        ranks.end(signal.SIGKILL)
    assert causes == {1: "was terminated by SIGKILL", 2: "failed: a bad row"}
    assert not ranks.exited_spares(), "each is told once"


def test_a_rank_that_was_stopped_and_goes_on_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.launching.processes.SECONDS_STOPPED", 0.2)
    ranks = ranks_of(tmp_path, "import time; time.sleep(60)")
    ranks.start([{"RANK": "3"}])
    rank = ranks.processes[3]
    try:
        for sent, stopped in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
            os.kill(rank.pid, sent)
            assert wait_for(partial(lambda expected: is_stopped(rank.pid) == expected, stopped))
            for _ in range(2):  # within the time that it may be stopped
                ranks.kill_stopped()
        time.sleep(0.3)
        ranks.kill_stopped()
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.2)
    finally:
        ranks.end(signal.SIGKILL)


def test_a_spare_does_not_leave_the_record_of_the_rank_before_it_nor_a_process(tmp_path: Path) -> None:
    program = f"""
import json, os, sys, time
if "{NEWCOMER}" in os.environ:
    time.sleep(60)
json.dump({{"message": "a bad row"}}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
sys.exit(1)
"""
    ranks = ranks_of(tmp_path, program)
    ranks.start([{"RANK": "3"}])

    def failure() -> tuple[int, Mapping[str, Any]]:
        assert wait_for(lambda: ranks.look() or 3 in ranks.failures)  # type: ignore[func-returns-value]
        found = ranks.failures.pop(3)
        return found.status, found.record

    try:
        assert failure() == (1, {"message": "a bad row"})
        ranks.start_spare(1, {})
        ranks.count_spare(1, 3)
        os.kill(ranks.processes[3].pid, signal.SIGKILL)
        assert failure() == (-signal.SIGKILL, {})
        assert not ranks.exited_spares(), "it was a rank"
        before = {*children(os.getpid())}
        ranks.start_spare(2, {})
        [spare] = {*children(os.getpid())} - before
        ranks.kill_spare(2)
        assert spare not in children(os.getpid()), "it has been waited for, too"
        assert not ranks.exited_spares()
    finally:
        ranks.end(signal.SIGKILL)
