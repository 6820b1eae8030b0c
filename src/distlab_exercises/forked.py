"""A fork of this process for each rank, which answers over a pipe."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

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
    work(rank, pipes[rank][1])
    leave(0)
