"""How long a rank computes at a time, on a core that it shares with other ranks."""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SLICE_SECONDS = 0.01
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the number of this system call, for which Python has no function
ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # struct sched_attr: size, policy, flags, nice, priority, runtime, …


@contextmanager
def long_time_slices() -> Iterator[None]:
    """In this context, the calling thread computes for 10 ms at a time while another one waits for its core.

    Linux lets threads take turns on a core after one to three milliseconds. Actions of two pipeline stages that take
    turns both end late. One after the other, the first ends early, and the stage that waits for its result can begin.
    A thread may ask for a time slice since Linux 6.12 (sched(7), sched_setattr(2): `sched_runtime`).

    Does nothing on earlier or other systems, or where the user has set a scheduling policy.
    """
    _request_slice(SLICE_SECONDS)
    try:
        yield
    finally:
        _request_slice(0)  # the system's own


def _request_slice(seconds: float) -> None:
    number = SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is not None and os.sched_getscheduler(0) == os.SCHED_OTHER:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = ATTRIBUTES.pack(ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, int(seconds * 1e9), 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)  # what it returns does not matter
