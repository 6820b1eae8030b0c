"""How long a rank computes at a time, on a core that it shares with other ranks."""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SLICE_SECONDS = 0.01
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the number of this system call, for which Python has no function
ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # struct sched_attr: size, policy, flags, nice, priority, runtime, …


@contextmanager
def long_time_slices() -> Iterator[None]:
    """In this context, the calling thread asks to compute for 10 ms at a time while another one waits for its core.

    Linux lets threads take turns on a core after a few milliseconds. Actions of two pipeline stages that take turns
    both end late. One after the other, the first ends early, and the stage that waits for its result can begin. Threads
    can ask for a time slice since Linux 6.12 (sched_setattr(2); the kernel's documentation, "EEVDF Scheduler"). A
    thread that is started in this context keeps the long slice.

    Does nothing on earlier or other systems, where a container forbids it, or if the user has set a scheduling policy.
    """
    _ask_for_slice(SLICE_SECONDS)
    try:
        yield
    finally:
        _ask_for_slice(0)  # the system's own


def _ask_for_slice(seconds: float) -> None:
    number = SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    with suppress(OSError):
        if number is not None and os.sched_getscheduler(0) == os.SCHED_OTHER:
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            attributes = ATTRIBUTES.pack(ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, int(seconds * 1e9), 0, 0)
            ctypes.CDLL(None).syscall(number, 0, attributes, 0)  # where it is refused, nothing has changed
