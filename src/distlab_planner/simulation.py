"""A schedule played on hosts whose cores, memory and network cards ranks share.

Where fewer ranks than cores compute at once, it is the simulation of `distlab.pipeline.plan`.
"""

import heapq
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distlab.pipeline.actions import Action, Result
from distlab_planner.graph import Graph


@dataclass(frozen=True)
class Work:
    """What a worker does for a while: seconds if no other rank computes, with as many threads."""

    seconds: float
    threads: int = 1
    action: Action | None = None
    needs: tuple[Result, ...] = ()


@dataclass(frozen=True)
class Played:
    """When the workers did what; lists have one entry per worker."""

    ends: list[list[float]]  # of each piece of work
    starts: list[list[float]]
    alone: list[float]  # what all of it would take if no other rank computed

    @property
    def makespan(self) -> float:
        return max(line[-1] for line in self.ends)


@dataclass
class Hosts:
    """How ranks that compute at the same time slow each other, by host."""

    of: Sequence[int]  # worker -> its host
    weight: Sequence[int]  # worker -> how many ranks of that host do the same
    slowdown: Callable[[float], float]  # busy ranks of a host -> what each takes, as a multiple
    cores: int = 1
    spin_seconds: float = 0.0  # that the further threads of a rank use a core after they have computed
    waking: Callable[[float], float] = lambda _: 0.0  # seconds of waiting for a message -> that work takes longer
    load: Counter[int] = field(default_factory=Counter)  # by host, ranks and threads that compute now

    def multiple(self, host: int, threads: int) -> float:
        """What work with so many threads takes now, as a multiple of what it takes alone.

        Its threads share it out equally, so that it has ended when the slowest has; where there are more busy threads
        than cores, that is one on a core with most of them.
        """
        load = self.load[host]
        slowest = -(-load // self.cores) if threads > 1 else 1
        return max(1.0, self.slowdown(load), slowest)


def play(
    works: Sequence[Sequence[Work]],
    hosts: Hosts,
    message: Callable[[int, int], float],
    owners: dict[int, int],
    carrying: Callable[[int, int], float] = lambda *_: 0.0,
) -> Played:
    """Run every worker's works in order; one starts when what it needs has arrived.

    Args:
        message: (sender, receiver) -> seconds; an action's results set out when it ends, and after those that the
            sender has sent to the same receiver before.
        owners: by stage, its worker.
        carrying: (sender, receiver) -> seconds after which the next message between them can set out.
    """
    count = len(works)
    starts: list[list[float]] = [[] for _ in works]
    ends: list[list[float]] = [[] for _ in works]
    alone = [0.0] * count
    receivers = {need: worker for worker, line in enumerate(works) for work in line for need in work.needs}
    given: dict[Result, float] = {}  # when it was computed, or, if another worker needs it, when it set out
    free: dict[tuple[int, int], float] = {}  # by sender and receiver, when the next message can set out
    waiting: dict[Result, list[int]] = {}  # workers that cannot start without it
    # Of the workers, and then of the threads that each has besides its own, which spin after they have computed.
    begun = [0.0] * 2 * count  # what a worker does: seconds if it were alone
    left = [0.0] * 2 * count  # of these
    since = [0.0] * 2 * count  # when that was so
    pace = [1.0] * 2 * count  # seconds for each of these
    version = [0] * 2 * count  # of its expected end
    threads = [0] * 2 * count  # busy with it
    events: list[tuple[float, int, int, bool]] = [(0.0, worker, 0, False) for worker in range(count)]
    on_host: dict[int, list[int]] = {}
    for one in range(2 * count):
        on_host.setdefault(hosts.of[one % count], []).append(one)

    def change_load(one: int, change: int, now: float) -> None:
        """More or fewer threads of a worker compute, so that others of its host go on at another speed."""
        host = hosts.of[one % count]
        hosts.load[host] += hosts.weight[one % count] * change
        for other in on_host[host]:
            if not threads[other]:
                continue
            multiple = hosts.multiple(host, threads[other] if other < count else 1)
            if multiple != pace[other]:
                left[other] -= (now - since[other]) / pace[other]
                since[other], pace[other] = now, multiple
                expect(other)

    def expect(one: int) -> None:
        version[one] += 1
        heapq.heappush(events, (since[one] + left[one] * pace[one], one, version[one], True))

    def begin(one: int, seconds: float, used: int, now: float) -> None:
        """What a worker or its further threads do from now on."""
        begun[one] = left[one] = seconds
        since[one], pace[one], threads[one] = now, 1.0, used
        change_load(one, used if seconds else 0, now)
        if pace[one] == 1.0:
            expect(one)

    def end(one: int, now: float) -> None:
        used, threads[one] = threads[one], 0
        version[one] += 1
        change_load(one, -used if begun[one] else 0, now)

    def start(worker: int, now: float) -> None:
        """Begin a worker's next work if it can, else wait for what it needs."""
        work = works[worker][len(starts[worker])]
        ready = now
        for result in work.needs:
            if result not in given:
                waiting.setdefault(result, []).append(worker)
                return
            sender = owners[result.stage]
            ready = max(ready, given[result] + (message(sender, worker) if sender != worker else 0.0))
        if ready > now:
            heapq.heappush(events, (ready, worker, version[worker], False))
            return
        starts[worker].append(now)
        if work.threads > 1 and threads[count + worker]:  # they spin no longer
            end(count + worker, now)
        waking = 0.0
        if any(owners[result.stage] != worker for result in work.needs):
            waking = hosts.waking(now - (ends[worker][-1] if ends[worker] else 0.0))
        begin(worker, work.seconds + waking, work.threads, now)
        alone[worker] += begun[worker]

    while events:
        now, worker, of_version, is_end = heapq.heappop(events)
        if of_version != version[worker]:
            continue
        if worker >= count:
            end(worker, now)
            continue
        if is_end:
            work = works[worker][len(ends[worker])]
            ends[worker].append(now)
            end(worker, now)
            if work.threads > 1 and hosts.spin_seconds:
                begin(count + worker, hosts.spin_seconds, work.threads - 1, now)
            for result in work.action.results if work.action else ():
                receiver, given[result] = receivers.get(result, worker), now
                if receiver != worker:
                    given[result] = max(now, free.get((worker, receiver), 0.0))
                    free[worker, receiver] = given[result] + carrying(worker, receiver)
                for other in waiting.pop(result, ()):
                    heapq.heappush(events, (now, other, version[other], False))
        if len(starts[worker]) < len(works[worker]) and not threads[worker]:
            start(worker, now)
    return Played(ends, starts, alone)


def play_undisturbed(
    graph: Graph,
    seconds: Sequence[float],
    before: Sequence[float],
    after: Sequence[float],
    message: Callable[[int, int], float],
    carrying: Callable[[int, int], float],
    waking: Callable[[float], float] = lambda _: 0.0,
) -> Played:
    """What `play` comes to where no rank slows another: as each action's time is then known, one pass is enough.

    Args:
        seconds: of each kind of action in `graph.examples`.
        before: of what each worker does before its actions; `after`: after them.
        message, carrying: (sender, receiver) -> seconds, as in `play`.
        waking: as of `Hosts`.
    """
    starts, ends = [[0.0] for _ in before], [[first] for first in before]
    free, sent = list(before), list[float]()  # when each worker is free; when each action's message set out
    links = {(sender, move.worker) for move in graph.moves for _, sender in move.needs}
    transfer, carried = ({link: seconds_of(*link) for link in links} for seconds_of in (message, carrying))
    next_one = dict.fromkeys(links, 0.0)  # when the next message can set out
    for move in graph.moves:
        worker = move.worker
        start = free[worker]
        for index, sender in move.needs:
            start = max(start, sent[index] + transfer[sender, worker])
        longer = waking(start - free[worker]) if move.needs else 0.0
        free[worker] = end = set_out = start + seconds[move.kind] + longer
        for receiver in move.receivers:
            link = worker, receiver
            set_out = max(end, next_one[link])
            next_one[link] = set_out + carried[link]
        sent.append(set_out)
        starts[worker].append(start)
        ends[worker].append(end)
    for worker, last in enumerate(after):
        starts[worker].append(free[worker])
        ends[worker].append(free[worker] + last)
    return Played(ends, starts, [sum(map(operator.sub, *line)) for line in zip(ends, starts, strict=True)])
