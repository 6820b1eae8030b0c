"""Calls with a time limit.

A call to a store or through gloo may never return, and signals do not interrupt it. So the call runs in a thread that
can be abandoned; `distlab.machine.processes.leave` exits without waiting for that thread.
"""

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

ResultT = TypeVar("ResultT")
SECONDS_OF_A_CALL = 0.5  # a call usually takes less; how often to check whether to keep waiting


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
