"""A fork of this process for each rank, which answers over a pipe; and the end of all that such processes start."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from distlab.machine.processes import end_with_parent, leave


@contextmanager
def forked(world_size: int, work: Callable[[int, Connection], object]) -> Iterator[dict[Connection, int]]:
    """Run `work(rank, pipe)` in a fork of this process for each rank.

    A fork takes milliseconds; a new interpreter takes seconds to import torch. This process must compute with one
    thread, as forks inherit no others. At the end of the context all ranks are killed, with the processes they started.

    Yields:
        The pipes to receive answers from, and the rank of each. A pipe ends when its rank does.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [context.Process(target=_run, args=(os.getpid(), pipes, rank, work)) for rank in range(world_size)]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each fork would write the rest of the buffer
    try:
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()
        yield {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
    finally:
        for process in ranks:
            if process.pid is not None:
                with suppress(OSError):  # it does not have a process group yet, or its group is empty
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()


def _run(
    parent: int, pipes: list[tuple[Connection, Connection]], rank: int, work: Callable[[int, Connection], object]
) -> None:
    for other, (receiver, sender) in enumerate(pipes):
        receiver.close()
        if other != rank:
            sender.close()  # or its end would not be seen
    with suppress(OSError):
        os.setpgid(0, 0)
    end_with_parent(signal.SIGKILL, parent)
    # A fork replaces torch's pool of threads when a thread first asks for it. If autograd's threads do so at the same
    # time, one of them may find no pool, and end the process ("Invalid thread pool!"); so this thread asks first.
    torch.set_num_threads(torch.get_num_threads())
    work(rank, pipes[rank][1])
    leave(0)


@contextmanager
def leaving_no_process() -> Iterator[None]:
    """Kill at the end all processes that the processes started in this context left behind, whatever their group.

    Linux gives them to this process when their parent dies (PR_SET_CHILD_SUBREAPER); elsewhere nothing is done.
    """
    before = _children()
    adopted = _adopt_orphans(True)
    try:
        yield
    finally:
        while left := _children() - before:  # their children appear when they have died
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        _adopt_orphans(adopted)


def _adopt_orphans(does: bool) -> bool:
    """On Linux, have the processes below this one become its children when their parents exit, or no longer.

    Returns whether they did before.
    """
    did = ctypes.c_int()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(37, ctypes.byref(did))  # PR_GET_CHILD_SUBREAPER
        ctypes.CDLL(None).prctl(36, int(does))  # PR_SET_CHILD_SUBREAPER
    return bool(did.value)


def _children() -> set[int]:
    """Return this process's child processes; none where the system does not list them."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found |= {int(pid) for pid in file.read_text().split()}
    return found
