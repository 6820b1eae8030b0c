"""The connections of a process, which it can shut down without their owner."""

import contextlib
import os
import socket
import stat
import time
from collections.abc import Collection, Iterable

from distlab.machine.processes import open_descriptors


def open_sockets() -> set[tuple[int, int]]:
    """Return this process's sockets: descriptor, and inode, by which a later use of the same number is recognized."""
    found = set()
    for descriptor in open_descriptors():
        with contextlib.suppress(OSError):  # that of the list itself
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                found.add((descriptor, status.st_ino))
    return found


def shut_down(sockets: Collection[tuple[int, int]], seconds: float = 0.1) -> None:
    """End the connections of `open_sockets` that are still open, at both ends. Their owner has yet to close them.

    At first they are only shut down for reading, and their owner has some time to notice that. A send of gloo's that
    finds its connection shut down for writing before gloo has noticed would wait until its deadline: `Pair::write`
    leaves the error to the next read, and that does not report it to sends that are not complete.
    """
    deadline = time.monotonic() + seconds
    while _shut_down(sockets, socket.SHUT_RD) and time.monotonic() < deadline:
        time.sleep(0.001)
    _shut_down(sockets, socket.SHUT_RDWR)


def _shut_down(sockets: Iterable[tuple[int, int]], how: int) -> bool:
    """Return whether one of the connections was still open."""
    any_open = False
    for descriptor, inode in sockets:
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino != inode:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if os.fstat(connection.fileno()).st_ino == inode:  # gloo's thread may just have closed it
                    connection.getpeername()  # gloo would end the process if its listener were shut down
                    any_open = True
                    connection.shutdown(how)
    return any_open
