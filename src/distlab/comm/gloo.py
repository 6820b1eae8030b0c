"""Connecting ranks over gloo, such that they can leave each other at any moment."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from distlab.machine.supervision import open_sockets, shut_down, within

SECONDS_BETWEEN_LOOKS = 0.005  # while ranks connect that can be abandoned
Sockets = set[tuple[int, int]]  # as `open_sockets` returns them


def connect(
    store: dist.Store, rank: int, size: int, timeout: timedelta, check: Callable[[], object] | None
) -> tuple[dist.ProcessGroupGloo, Sockets]:
    """Return gloo's group and, with `check`, its sockets, by which it can be abandoned.

    `check` is called while the ranks connect; an exception that it raises ends that.

    gloo's own connecting cannot be ended. It waits in the store, and blocks other calls to it; so it gets a connection
    to the store of its own, which can. If it waits for another rank to connect, it goes on until the timeout, in a
    thread of its own. A rank that has left would still accept the connections of others, which would then wait
    for it; so no rank uses the group before all have said in the store that they are there.
    """
    if check is None or size == 1:
        return dist.ProcessGroupGloo(store, rank, size, timeout), set()
    before, lock, has_left = open_sockets(), threading.Lock(), False
    sockets: Sockets = set()

    def note_sockets() -> None:
        nonlocal sockets
        with lock:
            if has_left:
                raise RuntimeError
            sockets = open_sockets() - before

    def meet() -> dist.ProcessGroupGloo:
        nonlocal sockets
        own_store = store.clone()  # type: ignore[attr-defined]  # torch's annotations lack it
        note_sockets()
        group = dist.ProcessGroupGloo(own_store, rank, size, timeout)
        with lock:
            if not has_left:
                sockets = open_sockets() - before
                own_store.set(f"is there/{rank}", "")
        while not has_left and not own_store.check([f"is there/{other}" for other in range(size)]):
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return group

    try:
        group = within(timeout.total_seconds(), meet, check, every=10 * SECONDS_BETWEEN_LOOKS)
        if group is None:
            raise RuntimeError("Timed out connecting to the other ranks")
    except Exception:
        with lock:
            has_left = True
        shut_down(sockets)
        raise
    return group, sockets
