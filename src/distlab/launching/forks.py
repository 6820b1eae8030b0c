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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn, TextIO

from distlab.machine.supervision import adopt_orphans, is_stopped, name_process, open_descriptors

FIRST_OTHER_DESCRIPTOR = 3  # after stdin, stdout and stderr
SECONDS_BETWEEN_LOOKS = 0.01
SECONDS_TO_FORK = 30.0  # all ranks of a machine


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


class ForkServer:
    """A fork of this process that forks ranks, which then are children of this process; on Linux.

    Make it before this process has connections or threads: a store, for example, has a thread that looks up the name of
    each process that connects. A fork during a look-up would inherit a lock of the C library that nobody will release,
    and could never look up a name. Nor must there be computing threads or CUDA, because a fork has neither.
    """

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would write the rest of the buffer
        gc.freeze()  # the collector would write to every object, and thus copy the memory shared with the forks
        self._adopted = adopt_orphans(True)
        self._server, requests = Pipe()
        with _signals_blocked() as before:  # until the fork has its own handlers
            self._process = Forked(os.fork())
            if self._process.pid == 0:
                self._server.close()
                _serve(requests, before)
        requests.close()

    def start(
        self,
        script: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        keep: Callable[[int, Forked], object],
    ) -> None:
        """Run a script once for each environment, in a separate session.

        Args:
            script: its path and its arguments.
            environments: by a number for each process.
            keep: called with each number and its process, before a signal can raise an exception here.

        Raises:
            OSError: the system cannot start them all, and none is left.
            EOFError, ConnectionError: the server was killed, or is stopped.
        """
        with handlers_later():
            self._refuse_if_stopped()
            self._server.send(([*script], [dict(environment) for environment in environments.values()]))
            deadline = time.monotonic() + SECONDS_TO_FORK
            while not self._server.poll(SECONDS_BETWEEN_LOOKS):
                self._refuse_if_stopped()
                if time.monotonic() > deadline:
                    raise EOFError
            answer = self._server.recv()
            if isinstance(answer, OSError):
                raise answer
            for number, pid in zip(environments, answer, strict=True):
                keep(number, Forked(pid))

    def _refuse_if_stopped(self) -> None:
        if is_stopped(self._process.pid):
            raise EOFError

    def close(self) -> None:
        """End the server; what it has started goes on."""
        self._server.close()
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        adopt_orphans(self._adopted)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[set[int]]:
    """Block all signals in this thread, as yet the only one; yields those that are blocked outside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def handlers_later() -> Iterator[None]:
    """Let the handlers of signals that arrive inside run at the end; in the main thread.

    `_signals_blocked` would not do once there are other threads, such as the store's: they would receive the signals.
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


def _serve(requests: Connection, blocked: Collection[int]) -> NoReturn:
    """Start what is asked for, with these signals blocked, until the asking process has closed its end, or exited."""
    try:
        os.setsid()  # Ctrl-C is for the launcher
        name_process("fork server")
        _have_the_signals_of_an_interpreter()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        while True:
            script, environments = requests.recv()
            try:
                requests.send(_fork_for_the_launcher(script, environments))
            except OSError as error:
                requests.send(error)
    finally:
        os._exit(1)


def _fork_for_the_launcher(script: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the processes that run a script. Their parent tells them, after 0 or an `errno`, and exits.

    So the launcher adopts them.
    """
    told, tell = os.pipe()
    parent = os.fork()
    if parent == 0:
        _fork_all(script, environments, tell)
    os.close(tell)
    os.waitpid(parent, 0)
    with open(told) as answer:
        text = answer.read()  # to its end: from now on their process groups can be killed
    error, *pids = map(int, text.split())
    if error:
        raise OSError(error, os.strerror(error))
    return pids


def _fork_all(script: Sequence[str], environments: Sequence[Mapping[str, str]], tell: int) -> NoReturn:
    parent, pids = os.getpid(), list[int]()
    try:
        for environment in environments:
            pid = os.fork()
            if pid == 0:
                os.setsid()
                os.close(tell)
                while os.getppid() == parent:
                    time.sleep(0.0001)
                _become(script, environment)
            pids.append(pid)
        os.write(tell, " ".join(map(str, [0, *pids])).encode())
    except OSError as error:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        os.write(tell, str(error.errno).encode())
    finally:
        os._exit(0)


def _have_the_signals_of_an_interpreter() -> None:
    for number in signal.Signals:
        if signal.getsignal(number) is not signal.SIG_IGN:  # a signal that nohup ignores stays ignored
            with contextlib.suppress(OSError, ValueError):  # SIGKILL and SIGSTOP have no handler
                signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python has them
        signal.signal(number, signal.SIG_IGN)


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


def _become(script: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a script in this process, as a new interpreter would, and exit."""
    status = 1
    try:
        _disconnect()
        os.environ.clear()
        os.environ.update(environment)
        if "RANK" in environment:
            name_process(f"rank {environment['RANK']}")
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
