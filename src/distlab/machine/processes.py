"""Calls into torch with a time limit, and how a process of the lab exits.

A call to a store or through gloo may never return, and signals do not interrupt it. So the call runs in a thread that
can be abandoned, and the process exits without waiting for that thread.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import NoReturn, TypeVar

from simplellm.errors import require

ResultT = TypeVar("ResultT")
SECONDS_OF_A_CALL = 0.5  # a call usually takes less; how often to check whether to keep waiting
LEAST_OPEN_FILES = 64  # six ranks of hybrid need about 40 each
MOST_DESCRIPTORS = 65536  # checked one by one; the limit may be a thousand million


def within(
    seconds: float, call: Callable[[], ResultT], meanwhile: Callable[[], object] = lambda: None
) -> ResultT | None:
    """Return `call()`, or raise its exception; None if it has not returned after `seconds` (its thread is abandoned).

    `meanwhile` is called about every half second during the wait; an exception that it raises ends the wait.
    """
    deadline = time.monotonic() + seconds
    answer: futures.Future[ResultT] = futures.Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not futures.wait([answer], min(SECONDS_OF_A_CALL, deadline - time.monotonic())).done:
        if time.monotonic() >= deadline:
            return None
        meanwhile()
    return answer.result()


def leave(status: int) -> NoReturn:
    """Exit without waiting for threads. Skips the interpreter's shutdown, during which threads inside torch abort."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader has exited, the disk is full, or it is closed
            stream.flush()
    os._exit(status)


def end_with_parent(by: signal.Signals) -> None:
    """Ask Linux to send this process a signal when its parent dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG


def require_open_files() -> None:
    """Raise this process's soft limit on open files to the hard one; `InputError` if that is too low for a rank.

    A rank has several for each other rank of each of its groups, and torch's errors do not say which limit is reached.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = most == resource.RLIM_INFINITY or most >= LEAST_OPEN_FILES
    require(enough, f"a process may have {most} open files, and a rank needs {LEAST_OPEN_FILES}; raise it (ulimit -n)")


def name_process(name: str) -> None:
    """Name this process for `ps -o comm`, `top` and `py-spy` on Linux; call it in the main thread."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME; /proc may be missing or read-only


def open_descriptors() -> list[int]:
    """Return the numbers of this process's open files; where /proc is missing, of those below the limit."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return [number for number in range(min(most % 2**64, MOST_DESCRIPTORS)) if _is_open(number)]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def leaving_no_process() -> Iterator[None]:
    """Kill at the end all processes that the processes started in this context left behind, whatever their group.

    Linux gives them to this process when their parent dies (PR_SET_CHILD_SUBREAPER); elsewhere nothing is done.
    """
    before = _children()
    _adopt(True)
    try:
        yield
    finally:
        while left := _children() - before:  # their children appear when they have died
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        _adopt(False)


def _adopt(orphans: bool) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, int(orphans))  # PR_SET_CHILD_SUBREAPER


def _children() -> set[int]:
    """Return this process's child processes; none where the system does not list them."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found |= {int(pid) for pid in file.read_text().split()}
    return found
