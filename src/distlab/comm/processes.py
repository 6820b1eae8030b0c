"""How a process of the lab avoids waiting without end for a call into torch, and how it ends.

A call to a store or through gloo may never return, and no signal interrupts it. So it is made in a thread that can be
abandoned, and the process exits without waiting for that thread.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import NoReturn, TypeVar

ResultT = TypeVar("ResultT")
SECONDS_OF_A_CALL = 0.5  # usually it takes less; how often to check whether to wait any longer


def within(
    seconds: float, call: Callable[[], ResultT], meanwhile: Callable[[], object] = lambda: None
) -> ResultT | None:
    """What `call()` returns or raises; None if it has not ended after `seconds`: its thread is then abandoned.

    `meanwhile` is called now and then; what it raises ends the wait.
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
    """Exit without waiting for threads, and without the interpreter's shutdown, at which those inside torch abort."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader has gone, the disk is full, it is closed
            stream.flush()
    os._exit(status)


def end_with_parent(by: signal.Signals) -> None:
    """Have Linux send this process a signal when its parent dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG
