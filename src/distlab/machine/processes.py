"""A process of the lab: how it was started, its name, its limits, its open files, and its exit."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from typing import NoReturn

from simplellm.errors import require

NEWCOMER = "LAB_NEWCOMER"  # variable of a process that takes the place of a dead rank: its number, from 1
LEAST_ADDRESS_SPACE = 750_000_000  # bytes, on a CPU
MOST_DESCRIPTORS = 65536  # checked one by one; the limit may be a thousand million
LEAST_OPEN_FILES = 64  # six ranks of hybrid need about 40 each


def started_by_torchrun() -> bool:
    """Return whether torchrun (or launch.sh) started this process, with rank, world size and address as variables."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_store_in_launcher() -> bool:
    """Return whether torchrun's agent, or the launcher of node 0, holds the ranks' store; otherwise rank 0 does."""
    return started_by_torchrun() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def name_process(name: str) -> None:
    """Name this process for `ps -o comm`, `top` and `py-spy` on Linux; call it in the main thread."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME; /proc may be missing or read-only


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP; False where /proc is missing."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def leave(status: int) -> NoReturn:
    """Exit without waiting for threads. Skips the interpreter's shutdown, during which threads inside torch abort."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader has exited, the disk is full, or it is closed
            stream.flush()
    os._exit(status)


def end_with_parent(by: signal.Signals, parent: int | None = None) -> None:
    """Ask Linux to send this process a signal when its parent dies, and send it now if that is not `parent` any more.

    Without `parent`, a parent that has died before this call is not noticed.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG
        if parent not in (None, os.getppid()):
            os.kill(os.getpid(), by)


def require_address_space() -> None:
    """Raise `InputError` if this process may have too little address space to import torch, which does not say so."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    enough, needed = most == resource.RLIM_INFINITY or most >= LEAST_ADDRESS_SPACE, LEAST_ADDRESS_SPACE / 1e6
    told = f"a process may have {most / 1e6:,.0f} MB of address space, and a rank needs {needed:,.0f} MB"
    require(enough, f"{told}; raise it (ulimit -v)")


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


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
