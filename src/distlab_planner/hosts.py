"""Hosts whose cores and memory ranks share: how much ranks that compute at the same time slow each other."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from distlab.pipeline.actions import Action
from distlab.pipeline.engine import Engine


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
        self._seconds = [0.0] * len(of)  # of the work in progress, if no other rank computed
        self._left = [0.0] * len(of)  # of these, seconds that remain
        self._since = [0.0] * len(of)  # the time of `_left`
        self._pace = [1.0] * len(of)  # seconds for each of these
        self._threads = [0] * len(of)  # busy with it
        self._on_host: dict[int, list[int]] = defaultdict(list)
        for worker, host in enumerate(of):
            self._on_host[host].append(worker)

    def begin(self, engine: Engine, index: int, now: float) -> None:
        """Begin an action, which changes the pace of others on its host."""
        worker, threads = engine.graph.workers[index], self._threads_of(engine.graph.actions[index])
        self._seconds[worker] = self._left[worker] = engine.alone[index]
        self._since[worker], self._pace[worker], self._threads[worker] = now, 1.0, threads
        self._change_load(engine, worker, threads, now)
        if self._pace[worker] == 1.0:
            engine.expect(worker, now + engine.alone[index])

    def end(self, engine: Engine, worker: int, now: float) -> None:
        """End a worker's action."""
        threads, self._threads[worker] = self._threads[worker], 0
        self._change_load(engine, worker, -threads, now)

    def _change_load(self, engine: Engine, worker: int, change: int, now: float) -> None:
        """Change the number of a worker's computing threads, and thus the pace of others on its host."""
        host = self._of[worker]
        if self._seconds[worker]:
            self._load[host] += self._weight[worker] * change
        for other in self._on_host[host]:
            if not self._threads[other]:
                continue
            multiple = self._multiple(self._load[host], self._threads[other])
            if multiple != self._pace[other]:
                self._left[other] -= (now - self._since[other]) / self._pace[other]
                self._since[other], self._pace[other] = now, multiple
                engine.expect(other, now + self._left[other] * multiple)

    def _multiple(self, load: int, threads: int) -> float:
        """Return the time of work with `threads` threads under a load, as a multiple of its time alone.

        Its threads have equal shares, so it ends when the slowest ends; where there are more busy threads than cores,
        that is one on a core with most of them.
        """
        slowest = -(-load // self._cores) if threads > 1 else 1
        return max(1.0, self._slowdown(load), slowest)
