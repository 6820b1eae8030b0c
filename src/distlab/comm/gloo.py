"""Connecting ranks over gloo, such that they can leave each other at any moment."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from distlab.machine.sockets import open_sockets, shut_down
from distlab.machine.time_limits import ResultT, within

SECONDS_BETWEEN_LOOKS = 0.005  # while ranks connect that can be abandoned
SECONDS_TO_CONNECT = 2.0  # usually less, when all ranks have come
Sockets = set[tuple[int, int]]  # as `open_sockets` returns them


def connect(
    store: dist.Store, rank: int, size: int, timeout: timedelta, check: Callable[[], object] | None
) -> tuple[dist.ProcessGroupGloo, Sockets]:
    """Return gloo's group and, with `check`, its sockets, by which it can be abandoned.

    `check` is called while the ranks connect; an exception that it raises ends that.

    gloo's own connecting cannot be ended: a rank that waits for the connection of another one, which has left, waits
    until the timeout. So the ranks first wait for each other in the store, and when all have come, `check` gives them
    time to connect. gloo also blocks other calls to the store; so it gets a connection to the store of its own. A rank
    that has left would still accept the connections of others, which would then wait for it; so no rank uses the group
    before all have said in the store that they are there.
    """
    if check is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout), set()
    before, lock, has_left = open_sockets(), threading.Lock(), False
    deadline, undisturbed_until = time.monotonic() + timeout.total_seconds(), 0.0
    sockets: Sockets = set()

    def say(own_store: dist.Store, what: str) -> None:
        """Say in the store that this rank, unless it has left, has done something, and wait until all have."""
        nonlocal sockets
        with lock:
            if has_left:
                raise RuntimeError
            sockets = open_sockets() - before
            own_store.set(f"{what}/{rank}", "")
        while not has_left and not own_store.check([f"{what}/{other}" for other in range(size)]):
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def come() -> dist.Store:
        own_store: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's annotations lack it
        say(own_store, "came")
        return own_store

    def meet(own_store: dist.Store) -> dist.ProcessGroupGloo:
        nonlocal before, undisturbed_until
        before = open_sockets()  # with that of the store
        group = dist.ProcessGroupGloo(own_store, rank, size, timeout)
        undisturbed_until = 0.0
        say(own_store, "is there")
        return group

    def look() -> None:
        if time.monotonic() > undisturbed_until:
            check()

    def in_time(call: Callable[[], ResultT]) -> ResultT:
        answer = within(deadline - time.monotonic(), call, look, every=10 * SECONDS_BETWEEN_LOOKS)
        if not answer.done():
            raise RuntimeError("Timed out connecting to the other ranks")
        return answer.result()

    try:
        own_store = in_time(come)
        check()
        undisturbed_until = time.monotonic() + SECONDS_TO_CONNECT
        return in_time(lambda: meet(own_store)), sockets
    except Exception:
        with lock:
            has_left = True
        shut_down(sockets)
        raise


def drop(groups: list[object], seconds: float = 1.0) -> None:
    """Give back the threads, connections and memory of abandoned groups, to which nothing else may refer any more.

    The destructor of a group waits for the operations under way, usually for some milliseconds. They may still write
    into their tensors, so this function also waits, but not longer than `seconds`: an operation whose failure gloo has
    not noticed lasts until its deadline. It waits for a message over a closed connection, and so it writes nothing.
    Each group has a thread, or it would be destroyed only after the ones before it.
    """
    threads = [threading.Thread(target=[groups.pop()].clear, daemon=True) for _ in range(len(groups))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
