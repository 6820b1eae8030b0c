"""Ranks that are forks of their launcher: as new interpreters would be, and with nothing of the launcher's."""

import contextlib
import errno
import gc
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.processes import alive, ranks_of, wait_for

from distlab.launching.forks import Forked, ForkedRank, fork_ranks
from distlab.launching.processes import RankFailure, Ranks, can_start
from distlab.launching.supervisor import TerminatedError, raise_signal
from simplellm.errors import InputError

pytestmark = pytest.mark.quick


def fork(folder: Path, text: str, *args: str, **environment: str) -> Forked:
    script = folder / "script.py"
    script.write_text(text)
    [rank] = fork_ranks([str(script), *args], 1)
    rank.begin({"RANK": "0", **environment})
    return rank


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('no')", 1), ("1 / 0", 1), ("os.kill(0, 9)", -9)],
)
def test_ends_as_an_interpreter_does(end: str, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with open(os.dup(1), "w") as stdout, contextlib.redirect_stdout(stdout):
        print("launched")  # and not flushed: a fork must not write it once more
        assert fork(tmp_path, f"import os, sys\nprint('begun')\n{end}").wait(20) == status
    out, err = capfd.readouterr()
    assert out == "launched\nbegun\n", "it is written line by line"
    assert err.splitlines()[-1:] == {"sys.exit('no')": ["no"], "1 / 0": ["ZeroDivisionError: division by zero"]}.get(
        end, []
    )


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, raise_signal])
def test_has_the_signals_of_an_interpreter(handler: Any, tmp_path: Path) -> None:
    """A shell ignores some in what it starts in the background, and nohup ignores another; forks ignore them, too.

    But the handlers that the launcher has for them are its own.
    """
    text = "import signal; open({!r}, 'w').write(repr([(n, signal.getsignal(n)) for n in sorted(signal.Signals)]))"
    by_fork, by_interpreter = tmp_path / "fork", tmp_path / "interpreter"
    asked = [sys.executable, "-c", text.format(str(by_interpreter))]
    changed = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in changed]
    try:
        assert fork(tmp_path, text.format(str(by_fork))).wait(20) == 0
        subprocess.run(asked, check=True, timeout=20)
    finally:
        for number, own in zip(changed, before, strict=True):
            signal.signal(number, own)
    fork_has, interpreter_has = (re.sub(" at 0x[0-9a-f]+", "", path.read_text()) for path in (by_fork, by_interpreter))
    assert fork_has == interpreter_has


def test_is_a_main_module_with_arguments_an_environment_and_a_folder(tmp_path: Path) -> None:
    """The folder of the script itself, not of a link to it."""
    (tmp_path / "real").mkdir()
    (tmp_path / "script.py").symlink_to(tmp_path / "real/script.py")
    (tmp_path / "real/beside.py").write_text("NAME = 'beside'")
    text = """
import os, sys, beside
name = open("/proc/self/comm").read()
found = [__name__, *sys.argv[1:], beside.NAME, os.environ["RANK"], os.environ["HOME"], name]
open(sys.argv[1], "w").write(repr((found, os.getpid() == os.getsid(0))))
"""
    told = str(tmp_path / "told")
    assert fork(tmp_path, text, told, "-x", RANK="7").wait(20) == 0
    found = ["__main__", told, "-x", "beside", "7", os.environ["HOME"], "rank 7\n"]
    assert Path(told).read_text() == repr((found, True))
    assert "beside" not in sys.modules


def test_does_not_keep_the_launchers_connections(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
        script = fork(tmp_path, f"import time; open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(60)")
    try:
        assert wait_for((tmp_path / "begun").exists)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("localhost", port))
        with pytest.raises(subprocess.TimeoutExpired):
            script.wait(0.05)
    finally:
        os.killpg(script.pid, signal.SIGTERM)  # its handlers are not the launcher's
        assert script.wait(20) == -signal.SIGTERM


def test_the_launchers_file_objects_do_not_reach_what_the_fork_opens(tmp_path: Path) -> None:
    """A log handler of the launcher's, and one that the collector closes."""
    text = f"""
import gc, logging, os
files = [open({str(tmp_path)!r} + "/" + str(n), "w+b", buffering=0) for n in range(100)]
logging.warning("words")
gc.unfreeze()
gc.collect()
for number, file in enumerate(files):
    file.write(b"%d" % number)
"""
    cycle: list[object] = [(tmp_path / "collected").open("w")]
    cycle.append(cycle)
    handler = logging.FileHandler(tmp_path / "log")
    logging.root.addHandler(handler)
    gc.disable()
    try:
        del cycle
        assert fork(tmp_path, text).wait(20) == 0
    finally:
        gc.enable()
        logging.root.removeHandler(handler)
        handler.close()
    assert [(tmp_path / str(number)).read_text() for number in range(100)] == [str(number) for number in range(100)]
    assert (tmp_path / "log").read_text() == ""


def statuses_of_spares(ranks: Ranks) -> dict[int, int]:
    """Those of the spares that exit next."""
    exited = dict[int, RankFailure]()
    assert wait_for(lambda: bool(exited.update(ranks.exited_spares()) or exited))
    return {number: failure.status for number, failure in exited.items()}


def test_is_a_fork_of_the_launcher_before_it_had_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's thread may hold a lock of the C library, which a later fork would inherit.

    When no fork is left, a process is a new interpreter.
    """
    status = "4 * ('TORCHELASTIC_ERROR_FILE' not in os.environ) + 2 * hasattr(sys, 'has_store')"
    ranks = ranks_of(tmp_path, f"import os, sys; sys.exit({status} + ('distlab' in sys.modules))", forks=3)
    monkeypatch.setattr(sys, "has_store", True, raising=False)
    ranks.start([{"RANK": "0"}, {"RANK": "1"}])
    ranks.start_spare(1, {})
    assert [process.wait(20) for process in ranks.processes.values()] == [1, 1]
    assert statuses_of_spares(ranks) == {1: 1}
    ranks.start_spare(2, {})
    assert statuses_of_spares(ranks) == {2: 0}


def test_ranks_that_too_few_forks_are_left_for_leave_them_to_spares(tmp_path: Path) -> None:
    ranks = ranks_of(tmp_path, "import sys; sys.exit('distlab' in sys.modules)", forks=1)
    ranks.start([{"RANK": "0"}, {"RANK": "1"}])
    ranks.start_spare(1, {})
    assert [process.wait(20) for process in ranks.processes.values()] == [0, 0]
    assert statuses_of_spares(ranks) == {1: 1}


def test_a_fork_that_was_killed_before_it_began_is_found(tmp_path: Path) -> None:
    forks = fork_ranks(["a"], 1)
    os.kill(forks[0].pid, signal.SIGKILL)
    assert wait_for(lambda: not alive(forks[0].pid))
    ranks = Ranks(["a"], tmp_path / "errors", forks)
    ranks.start([{"RANK": "0"}])
    ranks.look()
    assert ranks.failures[0].cause == "was terminated by SIGKILL"


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_forks_that_have_not_begun_end_with_the_launcher(sent: signal.Signals) -> None:
    """However it ends; and with it when it no longer needs them."""
    told, tell = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        os.write(tell, " ".join(str(rank.pid) for rank in fork_ranks(["a"], 3)).encode())
        time.sleep(60)
        os._exit(0)
    forks = [int(pid) for pid in os.read(told, 100).split()]
    assert len(forks) == 3
    os.kill(launcher, sent)
    os.waitpid(launcher, 0)
    assert wait_for(lambda: not any(map(alive, forks)))
    for end in (told, tell):
        os.close(end)


@pytest.mark.parametrize("state", ["waits", "is stopped"])
def test_a_fork_that_is_not_needed_is_ended(state: str) -> None:
    for rank in fork_ranks(["a"], 2):
        if state == "is stopped":
            os.kill(rank.pid, signal.SIGSTOP)
        rank.cancel()
        assert not alive(rank.pid)


def test_a_signal_while_ranks_start_does_not_lose_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises as soon as the launcher knows their processes."""
    ranks = ranks_of(tmp_path, "import time; time.sleep(60)", forks=2)
    begin, end = ForkedRank.begin, threading.Event()

    def begin_with_a_signal(rank: ForkedRank, variables: Mapping[str, str]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # it may arrive in another thread
        begin(rank, variables)

    monkeypatch.setattr(ForkedRank, "begin", begin_with_a_signal)
    threading.Thread(target=end.wait).start()  # signals that the main thread blocks are for it
    before = signal.signal(signal.SIGTERM, raise_signal)
    try:
        with pytest.raises(TerminatedError):
            ranks.start([{"RANK": "3"}, {"RANK": "5"}])
    finally:
        end.set()
        signal.signal(signal.SIGTERM, before)
        started = dict(ranks.processes)
        ranks.end(signal.SIGKILL)
    assert {rank: process.returncode for rank, process in started.items()} == dict.fromkeys((3, 5), -signal.SIGKILL)


def test_a_signal_while_ranks_are_forked_ends_only_the_launcher() -> None:
    """Its handlers are not for the forks, of which each would otherwise end as a launcher does."""
    told, tell = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        forked = os.fork

        def fork_with_a_signal() -> int:
            pid = forked()
            os.kill(os.getpid(), signal.SIGTERM)  # in both
            return pid

        os.fork = fork_with_a_signal
        signal.signal(signal.SIGTERM, raise_signal)
        try:
            fork_ranks(["a"], 2)
        except TerminatedError:
            os.write(tell, b"x")
        finally:
            os._exit(0)
    os.close(tell)
    os.waitpid(launcher, 0)
    with open(told) as ends:  # until all forks have exited
        assert ends.read() == "x"


def test_a_fork_that_fails_is_told_and_leaves_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    forked, forks = os.fork, list[int]()

    def fork_twice() -> int:
        if len(forks) == 2:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        forks.append(forked())
        return forks[-1]

    monkeypatch.setattr(os, "fork", fork_twice)
    with pytest.raises(InputError, match="the ranks cannot be started: Cannot allocate memory"), can_start("the ranks"):
        fork_ranks(["a"], 3)
    assert not any(map(alive, forks))
