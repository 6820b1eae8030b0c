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
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn, TextIO

from distlab.machine.processes import name_process, open_descriptors

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


class ForkedRank(Forked):
    """A fork of this process that runs a script, in a session of its own, once it is told its variables.

    Args:
        script: its path and its arguments.
    """

    def __init__(self, script: Sequence[str]) -> None:
        told, self._tell = Pipe(duplex=False)
        super().__init__(os.fork())
        if self.pid == 0:
            _become(script, told)
        told.close()

    def begin(self, variables: Mapping[str, str]) -> None:
        """Make it run the script, with these environment variables in addition to those of this process."""
        with contextlib.suppress(BrokenPipeError):  # it has been killed, as `poll` says
            self._tell.send({**variables})
        self._tell.close()

    def cancel(self) -> None:
        """End a fork that has not begun."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def fork_ranks(script: Sequence[str], count: int) -> list[ForkedRank]:
    """Return forks that wait for `begin`, and exit if this process ends before.

    Call it before this process has connections or threads: a store, for example, has a thread that looks up the name of
    each process that connects. A fork during a look-up would inherit a lock of the C library that nobody will release,
    and could never look up a name. Nor must there be computing threads or CUDA, because a fork has neither.

    Raises:
        OSError: the system cannot start them all, and none is left.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each fork would write the rest of the buffer
    gc.freeze()  # the collector would write to every object, and thus copy the memory shared with the forks
    forks: list[ForkedRank] = []
    with handlers_later():  # a fork must not run this process's handlers before it has its own
        try:
            for _ in range(count):
                forks.append(ForkedRank(script))
        except OSError:
            for fork in forks:
                fork.cancel()
            raise
    return forks


@contextlib.contextmanager
def handlers_later() -> Iterator[None]:
    """Let the handlers of signals that arrive inside run at the end; in the main thread.

    To block the signals would not do once there are other threads, such as the store's: they would receive them.
    """
    received: list[int] = []
    handlers = {number: handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))}
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: received.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for arrived in received:
            signal.raise_signal(arrived)


def _have_the_signals_of_an_interpreter() -> None:
    for number in signal.Signals:
        if signal.getsignal(number) is not signal.SIG_IGN:  # what nohup or Python ignores stays ignored
            with contextlib.suppress(OSError, ValueError):  # SIGKILL and SIGSTOP have no handler
                signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _disconnect(kept: int) -> None:
    """Put /dev/null in place of the launcher's connections and files, but for the descriptor `kept`.

    If they were closed, new files of this process would get their numbers, and a file object of the launcher, such as
    a log handler's, would write into such a file, or close it on garbage collection.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in open_descriptors():
        if descriptor >= FIRST_OTHER_DESCRIPTOR and descriptor not in (null, kept):
            try:
                os.dup2(null, descriptor, inheritable=False)
            except OSError:  # above the limit on open files, which may have been lowered since it was opened
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def _own(stream: TextIO | None, number: int) -> TextIO:
    """Return a new stream that replaces the launcher's in this process, in the same encoding."""
    encoding = stream.encoding if stream else None
    return os.fdopen(number, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False)


def _become(script: Sequence[str], told: Connection) -> NoReturn:
    """Run a script in this process, as a new interpreter would, when its variables have been told; and exit."""
    status = 1
    try:
        os.setsid()  # Ctrl-C is for the launcher
        _have_the_signals_of_an_interpreter()
        _disconnect(told.fileno())
        name_process("idle rank")
        try:
            os.environ.update(told.recv())
        except EOFError:  # the launcher has ended
            os._exit(0)
        told.close()
        name_process(f"rank {os.environ['RANK']}")
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
