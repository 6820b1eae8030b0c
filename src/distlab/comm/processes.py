"""How a process of the lab ends, and how it is not held up before: by threads that sit in a call into torch.

Such a call, to a store or through gloo, may never return, and no signal interrupts it. So it is made in a thread that
can be left behind, and the process ends without waiting for it.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

ResultT = TypeVar("ResultT")
SECONDS_OF_A_CALL = 0.5  # usually it takes less; after each of these one may see whether to wait any longer


def within(
    seconds: float, call: Callable[[], ResultT], meanwhile: Callable[[], object] = lambda: None
) -> ResultT | None:
    """What `call()` returns or raises; None if it has not ended after `seconds`: it is left behind then.

    Args:
        seconds: how long to wait.
        call: what may not return.
        meanwhile: called now and then; what it raises ends the wait.
    """
    deadline = time.monotonic() + seconds
    results: list[ResultT] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(seconds, SECONDS_OF_A_CALL))
    while thread.is_alive() and time.monotonic() < deadline:
        meanwhile()
        thread.join(min(SECONDS_OF_A_CALL, max(0, deadline - time.monotonic())))
    if errors:
        raise errors[0]
    return results[0] if results else None


def leave(status: int) -> NoReturn:
    """Exit without a wait for threads, and without the interpreter's end, at which those inside of torch abort."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader has gone, the disk is full, it is closed
            stream.flush()
    os._exit(status)


def end_with_parent(by: signal.Signals) -> None:
    """Have Linux send this process a signal when its parent dies."""
    with contextlib.suppress(OSError, AttributeError):
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, by)
