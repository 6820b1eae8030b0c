"""Ranks that are forks of their launcher: as new interpreters would be, and with nothing of the launcher's."""

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
from pathlib import Path
from typing import Any

import pytest
from support.processes import alive, children, name, wait_for

from distlab.launching.forks import SECONDS_TO_FORK, Forked, ForkServer
from distlab.launching.processes import Ranks
from distlab.launching.supervisor import TerminatedError, raise_signal
from distlab.machine.supervision import adopt_orphans, is_stopped
from simplellm.errors import InputError

pytestmark = pytest.mark.quick


def fork(folder: Path, text: str, *args: str, **environment: str) -> Forked:
    script = folder / "script.py"
    script.write_text(text)
    return start([str(script), *args], {**os.environ, **environment})


def start(script: list[str], environment: dict[str, str]) -> Forked:
    server, found = ForkServer(), dict[int, Forked]()
    try:
        server.start(script, {0: environment}, found.__setitem__)
        return found[0]
    finally:
        server.close()


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('no')", 1), ("1 / 0", 1), ("os.kill(0, 9)", -9)],
)
def test_ends_as_an_interpreter_does(end: str, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert fork(tmp_path, f"import os, sys\nprint('begun')\n{end}").wait(20) == status
    out, err = capfd.readouterr()
    assert out == "begun\n", "it is written line by line"
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


def test_a_limit_on_the_size_of_files_is_an_error_as_in_an_interpreter(tmp_path: Path) -> None:
    text = """
import errno, os, resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    os.ftruncate(os.memfd_create("memory"), 2000)
except OSError as error:
    raise SystemExit(error.errno == errno.EFBIG and 5)
"""
    assert fork(tmp_path, text).wait(20) == 5


def test_is_a_main_module_with_arguments_an_environment_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    text = """
import os, sys, beside
name = open("/proc/self/comm").read()
found = [__name__, *sys.argv[1:], beside.NAME, os.environ["RANK"], os.environ.get("HOME"), name]
open(sys.argv[1], "w").write(repr((found, os.getpid() == os.getsid(0))))
"""
    told = str(tmp_path / "told")
    script = tmp_path / "script.py"
    script.write_text(text)
    assert start([str(script), told, "-x"], {"RANK": "7"}).wait(20) == 0
    assert Path(told).read_text() == repr((["__main__", told, "-x", "beside", "7", None, "rank 7\n"], True))
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


def test_is_a_fork_of_the_launcher_before_it_had_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's thread may hold a lock of the C library, which a later fork would inherit."""
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit(hasattr(sys, 'has_store'))")
    server = ForkServer()
    try:
        monkeypatch.setattr(sys, "has_store", True, raising=False)
        ranks = Ranks([str(script)], tmp_path / "errors", server)
        ranks.start([{"RANK": "0"}, {"RANK": "1"}])
        ranks.start_spare(1, {})
        assert [process.wait(20) for process in ranks.processes.values()] == [0, 0]
        assert wait_for(lambda: ranks.exited_spares() == {1: 0})
    finally:
        server.close()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_was_killed_or_stopped_is_named_at_once(sent: signal.Signals, tmp_path: Path) -> None:
    server = ForkServer()
    assert wait_for(lambda: "fork server" in map(name, children(os.getpid())))
    pid = next(pid for pid in children(os.getpid()) if name(pid) == "fork server")
    os.kill(pid, sent)
    assert wait_for(lambda: is_stopped(pid) or not alive(pid))
    started = time.monotonic()
    with pytest.raises(InputError, match="cannot be started: the process that forks ranks was killed or is stopped"):
        Ranks(["a"], tmp_path / "errors", server).start([{"RANK": "0"}])
    server.close()
    assert time.monotonic() < started + SECONDS_TO_FORK / 2
    assert not alive(pid)


def test_a_signal_while_ranks_start_does_not_lose_them(tmp_path: Path) -> None:
    """It raises as soon as the launcher knows their processes; and orphans go where they went before."""
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(60)")
    found: dict[int, Forked] = {}

    def keep(number: int, process: Forked) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # it may arrive in another thread
        found[number] = process

    adopted, before = adopt_orphans(True), signal.signal(signal.SIGTERM, raise_signal)
    server, end = ForkServer(), threading.Event()
    threading.Thread(target=end.wait).start()  # signals that the main thread blocks are for it
    try:
        with pytest.raises(TerminatedError):
            server.start([str(script)], {3: {"RANK": "3"}, 5: {"RANK": "5"}}, keep)
    finally:
        end.set()
        signal.signal(signal.SIGTERM, before)
        server.close()
        kept = adopt_orphans(adopted)
        for process in found.values():
            os.kill(process.pid, signal.SIGKILL)
    assert {number: process.wait(20) for number, process in found.items()} == {3: -signal.SIGKILL, 5: -signal.SIGKILL}
    assert kept, "as before the server"


def test_a_fork_that_fails_is_told_and_leaves_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked, forks = os.fork, 0

    def fork_four_times() -> int:  # each process counts on from its parent: the server, a parent of ranks, two ranks
        nonlocal forks
        forks += 1
        if forks > 4:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return forked()

    monkeypatch.setattr(os, "fork", fork_four_times)
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(60)")
    server = ForkServer()
    try:
        with pytest.raises(InputError, match="the ranks cannot be started: Cannot allocate memory"):
            Ranks([str(script)], tmp_path / "errors", server).start([{"RANK": str(rank)} for rank in range(3)])
        ranks = Ranks([str(script)], tmp_path / "others", server)
        ranks.start([{"RANK": "0"}])  # the server goes on
        ranks.kill(0)
        assert wait_for(lambda: not any(name(pid).startswith("rank") for pid in children(os.getpid())))
    finally:
        server.close()
