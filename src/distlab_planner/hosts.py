"""Hosts whose cores and memory ranks share: how much ranks that compute at the same time slow each other."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from distlab.pipeline.actions import Action
from distlab.pipeline.engine import Engine


class SharedHosts:
    """The current work of the workers, each at a pace that depends on how many compute on its host.

    The additional threads of a worker are numbered after the workers. After computing, they occupy a core for a while,
    in which they look for more work.

    Args:
        of: worker -> its host.
        weight: worker -> number of ranks of that host that do the same.
        slowdown: busy ranks of a host -> time of each, as a multiple.
        threads: action -> its threads.
        cores: cores of a host.
        spin_seconds: seconds for which the additional threads of a worker occupy a core after computing.
    """

    def __init__(
        self,
        of: Sequence[int],
        weight: Sequence[int],
        slowdown: Callable[[float], float],
        threads: Callable[[Action], int] = lambda _: 1,
        cores: int = 1,
        spin_seconds: float = 0.0,
    ) -> None:
        self._of, self._weight, self._slowdown, self._threads_of = [*of, *of], [*weight, *weight], slowdown, threads
        self._cores, self._spin_seconds, self._workers = cores, spin_seconds, len(of)
        self._load: Counter[int] = Counter()  # by host, ranks and threads that compute now
        self._seconds = [0.0] * 2 * len(of)  # of the work in progress, if no other rank computed
        self._left = [0.0] * 2 * len(of)  # of these, seconds that remain
        self._since = [0.0] * 2 * len(of)  # the time of `_left`
        self._pace = [1.0] * 2 * len(of)  # seconds for each of these
        self._threads = [0] * 2 * len(of)  # busy with it
        self._on_host: dict[int, list[int]] = defaultdict(list)
        for one, host in enumerate(self._of):
            self._on_host[host].append(one)

    def begin(self, engine: Engine, index: int, now: float) -> None:
        """Begin an action; threads of its worker stop spinning."""
        worker, threads = engine.graph.workers[index], self._threads_of(engine.graph.actions[index])
        if threads > 1:
            self.end(engine, self._workers + worker, now)
        self._begin(engine, worker, engine.alone[index], threads, now)

    def end(self, engine: Engine, one: int, now: float) -> None:
        """End an action, after which the worker's additional threads spin, or end the spinning."""
        threads, self._threads[one] = self._threads[one], 0
        if not threads:  # they have not spun, or no longer do
            return
        self._change_load(engine, one, -threads, now)
        if one < self._workers and threads > 1 and self._spin_seconds:
            self._begin(engine, self._workers + one, self._spin_seconds, threads - 1, now)

    def _begin(self, engine: Engine, one: int, seconds: float, threads: int, now: float) -> None:
        self._seconds[one] = self._left[one] = seconds
        self._since[one], self._pace[one], self._threads[one] = now, 1.0, threads
        self._change_load(engine, one, threads, now)
        if self._pace[one] == 1.0:
            engine.expect(one, now + seconds)

    def _change_load(self, engine: Engine, one: int, change: int, now: float) -> None:
        """Change the number of a worker's computing threads, and thus the pace of others on its host."""
        host = self._of[one]
        if self._seconds[one]:
            self._load[host] += self._weight[one] * change
        for other in self._on_host[host]:
            if not self._threads[other]:
                continue
            multiple = self._multiple(self._load[host], self._threads[other] if other < self._workers else 1)
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
