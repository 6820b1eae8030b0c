"""Calls with a time limit, and the child processes and files of a process that starts others.

A call to a store or through gloo may never return, and signals do not interrupt it. So the call runs in a thread that
can be abandoned; `leave` exits without waiting for that thread.
"""

import contextlib
import ctypes
import os
import resource
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from pathlib import Path
from typing import TypeVar

ResultT = TypeVar("ResultT")
SECONDS_OF_A_CALL = 0.5  # a call usually takes less; how often to check whether to keep waiting
MOST_DESCRIPTORS = 65536  # checked one by one; the limit may be a thousand million


def within(
    seconds: float,
    call: Callable[[], ResultT],
    meanwhile: Callable[[], object] = lambda: None,
    every: float = SECONDS_OF_A_CALL,
) -> futures.Future[ResultT]:
    """Return the outcome of `call()`; it is not `done` if that has not returned after `seconds`.

    Its thread is then abandoned. `meanwhile` is called about once in `every` seconds during the wait; an exception that
    it raises ends the wait.
    """
    deadline = time.monotonic() + seconds
    answer: futures.Future[ResultT] = futures.Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not futures.wait([answer], min(every, deadline - time.monotonic())).done:
        if time.monotonic() >= deadline:
            break
        meanwhile()
    return answer


def name_process(name: str) -> None:
    """Name this process for `ps -o comm`, `top` and `py-spy` on Linux; call it in the main thread."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME; /proc may be missing or read-only


def open_descriptors() -> list[int]:
    """Return the numbers of this process's open files; where the system does not list them, of those below the limit.

    A repair needs them on every system: a rank that waits for another survivor leaves its wait only when that one
    shuts down its sockets.
    """
    try:
        return [int(name) for name in os.listdir("/dev/fd")]
    except OSError:  # on Linux a link into /proc, which may be missing
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return [number for number in range(min(most % 2**64, MOST_DESCRIPTORS)) if _is_open(number)]


def open_sockets() -> set[tuple[int, int]]:
    """Return this process's sockets: descriptor, and inode, by which a later use of the same number is recognized."""
    found = set()
    for descriptor in open_descriptors():
        with contextlib.suppress(OSError):  # that of the list itself
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                found.add((descriptor, status.st_ino))
    return found


def shut_down(sockets: Iterable[tuple[int, int]]) -> None:
    """End the connections of `open_sockets` that are still open, at both ends. Their owner has yet to close them."""
    for each in sockets:
        with contextlib.suppress(OSError):
            if os.fstat(each[0]).st_ino == each[1]:
                with socket.socket(fileno=os.dup(each[0])) as connection:
                    connection.getpeername()  # gloo would end the process if its listener were shut down
                    connection.shutdown(socket.SHUT_RDWR)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP; False where /proc is missing."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
