"""Ranks as forks of their launcher: a fork takes milliseconds; a new interpreter imports torch, which takes seconds."""

import atexit
import contextlib
import gc
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from distlab.machine.supervision import name_process, open_descriptors

FIRST_OTHER_DESCRIPTOR = 3  # after stdin, stdout and stderr
SECONDS_BETWEEN_LOOKS = 0.01


class Forked:
    """A process forked from this one, with the methods of `subprocess.Popen` that a supervisor uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; `subprocess.TimeoutExpired` if the process still runs after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        assert self.returncode is not None
        return self.returncode


class Gate:
    """Keeps forks from running until all have been made.

    A store in this process has a thread that looks up the name of each process that connects. A fork that is made
    during such a look-up inherits a lock of the C library that nobody will release, and can never look up a name.
    """

    def __init__(self) -> None:
        self._inside, self._outside = os.pipe()

    def wait(self) -> None:
        """In a fork, wait until the gate is open, or the forking process has exited."""
        os.close(self._outside)
        os.read(self._inside, 1)
        os.close(self._inside)

    def open(self) -> None:
        """Let the forks run."""
        for descriptor in (self._outside, self._inside):
            os.close(descriptor)


class ForkedScript(Forked):
    """A script in a separate session.

    The forking process must not have started computing threads or CUDA, because a fork has neither.

    Args:
        script: a file, and its arguments.
        environment: all of its environment variables.
        gate: keeps the script from running until it is open.
    """

    def __init__(self, script: Sequence[str], environment: Mapping[str, str], gate: Gate | None = None) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would write the rest of the buffer
        gc.freeze()  # the collector would write to every object, and thus copy the memory shared with the forks
        begun, has_session = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until the fork has its own handlers
        try:
            super().__init__(os.fork())
            if self.pid == 0:
                os.setsid()
                os.close(has_session)
                _become(script, environment, before, gate)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(has_session)
        os.read(begun, 1)  # returns when the fork has closed its end: from now on its process group can be killed
        os.close(begun)


def _disconnect() -> None:
    """Put /dev/null in place of the launcher's connections and files.

    If they were closed, new files of this process would get their numbers, and a file object of the launcher, such as
    a log handler's, would write into such a file, or close it on garbage collection.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in open_descriptors():
        if descriptor >= FIRST_OTHER_DESCRIPTOR and descriptor != null:
            try:
                os.dup2(null, descriptor, inheritable=False)
            except OSError:  # above the limit on open files, which may have been lowered since it was opened
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def _own(stream: TextIO | None, number: int) -> TextIO:
    """Return a new stream that replaces the launcher's in this process, in the same encoding."""
    encoding = stream.encoding if stream else None
    return os.fdopen(number, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False)


def _become(
    script: Sequence[str], environment: Mapping[str, str], signals: Collection[int], gate: Gate | None
) -> NoReturn:
    """Run a script in this process, as a new interpreter would, with these signals blocked, and exit."""
    status = 1
    try:
        if gate is not None:
            gate.wait()
        _disconnect()
        os.environ.clear()
        os.environ.update(environment)
        if "RANK" in environment:
            name_process(f"rank {environment['RANK']}")
        for number in signal.Signals:
            if signal.getsignal(number) is not signal.SIG_IGN:  # a signal that nohup ignores stays ignored
                with contextlib.suppress(OSError, ValueError):  # SIGKILL and SIGSTOP have no handler
                    signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python has them
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        sys.stdout, sys.stderr = (
            _own(stream, number) for number, stream in enumerate((sys.__stdout__, sys.__stderr__), 1)
        )
        sys.excepthook = sys.__excepthook__
        sys.argv, sys.path[0] = [*script], str(Path(script[0]).resolve().parent)
        runpy.run_path(script[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(OSError, ValueError):
            atexit._run_exitfuncs()  # as an interpreter does at its end
            sys.stdout.flush()
        os._exit(status)
