"""Hosts whose cores and memory ranks share: how much ranks that compute at the same time slow each other."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distlab.pipeline.actions import Action
from distlab.pipeline.engine import Engine


@dataclass
class _Work:
    """An action in progress."""

    left: float  # its seconds, if no other rank computed, that remained at the time `since`
    since: float
    threads: int  # busy with it
    pace: float = 1.0  # seconds for each of these


class SharedHosts:
    """The current work of the workers, each at a pace that depends on how many compute on its host.

    Args:
        of: worker -> its host.
        weight: worker -> number of ranks of that host that do the same.
        slowdown: busy ranks of a host -> time of each, as a multiple.
        threads: action -> its threads.
        cores: cores of a host.
    """

    def __init__(
        self,
        of: Sequence[int],
        weight: Sequence[int],
        slowdown: Callable[[float], float],
        threads: Callable[[Action], int] = lambda _: 1,
        cores: int = 1,
    ) -> None:
        self._of, self._weight, self._slowdown, self._threads_of, self._cores = of, weight, slowdown, threads, cores
        self._load: Counter[int] = Counter()  # by host, ranks and threads that compute now
        self._works: dict[int, dict[int, _Work]] = {host: {} for host in of}  # by host and worker

    def begin(self, engine: Engine, index: int, now: float) -> None:
        """Begin an action, which changes the pace of others on its host."""
        worker, seconds = engine.graph.workers[index], engine.alone[index]
        work = _Work(seconds, now, self._threads_of(engine.graph.actions[index]))
        self._works[self._of[worker]][worker] = work
        self._change_load(engine, worker, work.threads, now)
        if work.pace == 1.0:
            engine.expect(worker, now + seconds)

    def end(self, engine: Engine, worker: int, now: float) -> None:
        """End a worker's action."""
        work = self._works[self._of[worker]].pop(worker)
        self._change_load(engine, worker, -work.threads, now)

    def _change_load(self, engine: Engine, worker: int, change: int, now: float) -> None:
        """Change the number of a worker's computing threads, and thus the pace of others on its host."""
        host = self._of[worker]
        self._load[host] += self._weight[worker] * change
        for other, work in self._works[host].items():
            multiple = self._multiple(self._load[host], work.threads)
            if multiple != work.pace:
                work.left -= (now - work.since) / work.pace
                work.since, work.pace = now, multiple
                engine.expect(other, now + work.left * multiple)

    def _multiple(self, load: int, threads: int) -> float:
        """Return the time of work with `threads` threads under a load, as a multiple of its time alone.

        Its threads have equal shares, so it ends when the slowest ends; where there are more busy threads than cores,
        that is one on a core with most of them.
        """
        slowest = -(-load // self._cores) if threads > 1 else 1
        return max(1.0, self._slowdown(load), slowest)
