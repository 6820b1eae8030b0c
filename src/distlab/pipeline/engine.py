"""One simulation of pipelines: workers that run actions, and messages that travel between them.

Each action states its needs and its results; the caller gives the costs of actions and messages. The engine serves to
check and draw schedules (`plan`), to search for them (`auto`), and to predict them (the planner). The rules are the
executor's: a worker runs one action after another, an action starts when everything it needs has arrived, and a send
never blocks the sender.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from distlab.pipeline.actions import FACTORS, GRAPH, INPUT, WEIGHT_GRADIENTS, Action, Programs, Result
from simplellm.errors import InputError

NEVER = math.inf
LinkKey = tuple[int, int, str]  # sender, receiver (workers), kind of message


class ScheduleError(InputError):
    """A schedule that cannot run, or whose result would differ from that of one process."""


class Graph:
    """The actions of all workers, numbered, and the numbers of the inputs and messages of each.

    A need is the number of an action of the same worker, or of a message; messages are numbered after the actions.

    Attributes:
        actions: by number: worker 0's in order, worker 1's in order, …
        lines: by worker, the numbers of its actions.
        workers: by action.
        owners: by stage, its worker; the first of them, if several workers hold it.
        numbers: by action, its number.
        producers: by result, the number of the action that computes it.
        takers: by result that another stage needs, the action that needs it, in worker order.
        links: by (sender, receiver), their number.
        needs: by action.
        sends: by action, each message with its number, its link and the receiver.
        size: number of actions and messages.

    Args:
        programs: of each worker.
        holders: the most workers that may hold a stage: the number of replicas, if the workers are those of several.

    Raises:
        ScheduleError: a result that is needed is never computed, or twice, or too late; or it is needed twice.
    """

    def __init__(self, programs: Programs, holders: int = 1) -> None:
        self._holders, self._workers_of = holders, dict[int, list[int]]()
        self.actions: list[Action] = [action for program in programs for action in program]
        ends = list(itertools.accumulate(map(len, programs)))
        self.lines = [range(end - len(program), end) for end, program in zip(ends, programs, strict=True)]
        self.workers = [worker for worker, line in enumerate(self.lines) for _ in line]
        self.owners: dict[int, int] = {}
        self.producers: dict[Result, int] = {}
        self.takers: dict[Result, Action] = {}
        self.links: dict[tuple[int, int], int] = {}
        self.needs: list[tuple[int, ...]] = []
        self.sends: list[list[tuple[int, int, int]]] = [[] for _ in self.actions]
        self.size = len(self.actions)
        self.numbers: dict[Action, int] = {}
        for index, action in enumerate(self.actions):
            self._add(index, action)
        for index, action in enumerate(self.actions):
            self.needs.append(tuple(self._source(result, index) for result in action.needs(len(self.owners))))

    def receives(self, index: int) -> int:
        """Return the number of messages that an action waits for."""
        return sum(need >= len(self.actions) for need in self.needs[index])

    def messages(self) -> dict[LinkKey, list[Result]]:
        """Return the messages over each link, in the order in which they are sent."""
        messages: dict[LinkKey, list[Result]] = defaultdict(list)
        for action, sender in zip(self.actions, self.workers, strict=True):
            for result in action.results:
                receiver = self.workers[self.numbers[self.takers[result]]] if result in self.takers else sender
                if receiver != sender:
                    messages[sender, receiver, result.kind].append(result)
        return dict(messages)

    def _add(self, index: int, action: Action) -> None:
        stage, worker = action.stage, self.workers[index]
        if stage < 0 or action.micro_batch < 0:
            raise ScheduleError(f"stage {stage} runs {action}; stages and micro-batches are numbered from 0")
        self.owners.setdefault(stage, worker)
        workers = self._workers_of.setdefault(stage, [])
        if worker not in workers:
            workers.append(worker)
        if len(workers) > self._holders:
            most = "one worker" if self._holders == 1 else f"at most {self._holders}"
            who = f"{', '.join(map(str, workers[:-1]))} and {worker}"
            raise ScheduleError(f"stage {stage} is run by workers {who}; give it to {most}")
        if self.numbers.setdefault(action, index) != index:
            raise ScheduleError(f"stage {stage} runs {action} twice; every action runs once")
        for result in action.results:
            if (other := self.producers.setdefault(result, index)) != index:
                both = f"in {self.actions[other]} and in {action}"
                raise ScheduleError(f"stage {stage} computes {result} twice, {both}")

    def _all_like(self, missing: Result) -> str:
        """Return a missing result in words, with all other micro-batches whose result of this kind is missing."""
        needed = (result for action in self.actions for result in action.needs(len(self.owners)))
        same = (one for one in needed if (one.kind, one.stage) == (missing.kind, missing.stage))
        numbers = sorted({one.micro_batch for one in same if one not in self.producers})
        others = f"es {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
        return str(missing) if len(numbers) == 1 else str(missing).replace(f" {missing.micro_batch}", others)

    def _source(self, result: Result, index: int) -> int:
        """Return the number of the source of a result: an action of the same worker, or a message, which is added."""
        action, source = self.actions[index], self.producers.get(result)
        stage, what = action.stage, f"{action} of stage {action.stage} needs"
        if source is None:
            raise ScheduleError(f"stage {result.stage} never computes {self._all_like(result)}, which {what}")
        if result.stage == stage:
            if source > index:
                raise ScheduleError(f"stage {stage} runs {action} before {self.actions[source]}")
            return source
        if result.kind in (INPUT, GRAPH, FACTORS, WEIGHT_GRADIENTS):
            raise ScheduleError(f"{what} {result}, which stays on stage {result.stage}")
        if (other := self.takers.setdefault(result, action)) != action:
            raise ScheduleError(f"stage {stage} needs {result} for {other} and for {action}, but it is sent only once")
        sender, receiver = self.workers[source], self.workers[index]
        if sender == receiver:
            return source
        link = self.links.setdefault((sender, receiver), len(self.links))
        self.sends[source].append((self.size, link, receiver))
        self.size += 1
        return self.size - 1


class Chooser(Protocol):
    """Decides what each worker runs next."""

    def choose(self, engine: "Engine", worker: int) -> tuple[float, int]:
        """Return when the worker starts its next action, as far as known now, and which; `NEVER` if it cannot start.

        An action that is not ready at that time starts as soon as it is.
        """

    def begun(self, index: int) -> None:
        """Note the beginning of an action."""


class InOrder:
    """Each worker runs its actions in a given order."""

    def __init__(self, graph: Graph, lines: Sequence[Sequence[int]]) -> None:
        self._workers, self._left = graph.workers, [[-1, *reversed(line)] for line in lines]

    def choose(self, engine: "Engine", worker: int) -> tuple[float, int]:
        index = self._left[worker][-1]
        return (engine.ready(index) if index >= 0 else NEVER), index

    def begun(self, index: int) -> None:
        self._left[self._workers[index]].pop()


class Contention(Protocol):
    """How actions that run at the same time slow each other."""

    def begin(self, engine: "Engine", index: int, now: float) -> None:
        """Begin an action: set in the engine when it is expected to end, now and whenever that changes."""

    def end(self, engine: "Engine", worker: int, now: float) -> None:
        """End a worker's action, at its expected end."""


class Engine:
    """Plays a graph once.

    Args:
        seconds: seconds of an action, if nothing slows it.
        message: (sender, receiver) -> seconds until a message has arrived, and until the next one can set out. A
            message sets out when the action that computes it ends, and after those that its sender sent before it to
            the same receiver.
        order: decides which action each worker runs next; by default, the order of the graph.
        waking: seconds that a worker has waited for a message -> additional seconds of its next action.
        hosts: how actions slow each other; a new object.
    """

    def __init__(
        self,
        graph: Graph,
        seconds: Callable[[Action], float],
        message: Callable[[int, int], tuple[float, float]] = lambda *_: (0.0, 0.0),
        order: Chooser | None = None,
        waking: Callable[[float], float] | None = None,
        hosts: Contention | None = None,
    ) -> None:
        workers = len(graph.lines)
        self.graph = graph
        self.alone = list(map(seconds, graph.actions))  # seconds of each action, if nothing slows it
        self.starts = [NEVER] * len(graph.actions)
        self.ends = [NEVER] * graph.size  # of actions, and then of messages
        self.free = [0.0] * workers  # when a worker's last action ends
        self.begun: list[int] = []  # actions in the order in which they start
        self._waking, self._order = waking, order or InOrder(graph, graph.lines)
        self._ways = [message(*link) for link in graph.links]
        self._last = [-1] * len(graph.links)  # message of each link
        self._before = [-1] * graph.size  # by message, the one before it on its link
        self._set_out = [-NEVER] * (graph.size + 1)  # by message; the last entry: there is none
        self._events: list[tuple[float, int, int]] = []  # (time, worker, version): its next action starts, or its ends
        self._versions = [0] * workers
        self._next = [-1] * workers  # the action that a worker starts next
        self._running = [-1] * workers  # the action that it runs, where hosts decide when that ends
        self._hosts = hosts
        for worker in range(workers):
            self._choose(worker)
        self._run()

    @property
    def makespan(self) -> float:
        """Seconds until the last worker has finished."""
        return max(self.free)

    def ready(self, index: int) -> float:
        """Return when an action can start: its worker is free, and its inputs are there. `NEVER` if this is unknown."""
        start, ends = self.free[self.graph.workers[index]], self.ends
        for need in self.graph.needs[index]:
            if ends[need] > start:
                start = ends[need]
        return start

    def expect(self, worker: int, end: float) -> None:
        """Set when a worker's action ends, as far as known now."""
        self._end(self._running[worker], end)
        self._versions[worker] += 1
        heapq.heappush(self._events, (end, worker, self._versions[worker]))

    def _run(self) -> None:
        while self._events:
            now, worker, version = heapq.heappop(self._events)
            if version != self._versions[worker]:
                continue
            if self._running[worker] < 0:
                self._begin(self._next[worker], now)
            elif self._hosts is not None:
                self._hosts.end(self, worker, now)
                self._running[worker] = -1
                self._choose(worker)

    def _choose(self, worker: int) -> None:
        start, self._next[worker] = self._order.choose(self, worker)
        self._versions[worker] += 1
        if start < NEVER:
            heapq.heappush(self._events, (start, worker, self._versions[worker]))

    def _begin(self, index: int, now: float) -> None:
        worker, start = self.graph.workers[index], max(now, self.ready(index))
        if self._waking is not None and self.graph.receives(index):
            self.alone[index] += self._waking(start - self.free[worker])
        self.starts[index] = start
        self.begun.append(index)
        self._order.begun(index)
        for message, link, _ in self.graph.sends[index]:
            self._before[message], self._last[link] = self._last[link], message
        if self._hosts is not None:
            self._running[worker] = index
            self._hosts.begin(self, index, start)
        else:
            self._end(index, start + self.alone[index])
            self._choose(worker)

    def _end(self, index: int, end: float) -> None:
        """Set when an action in progress ends, and thus when its messages arrive."""
        self.ends[index] = self.free[self.graph.workers[index]] = end
        for message, link, receiver in self.graph.sends[index]:
            seconds, busy_seconds = self._ways[link]
            self._set_out[message] = set_out = max(end, self._set_out[self._before[message]] + busy_seconds)
            self.ends[message] = set_out + seconds
            if self._running[receiver] < 0:
                self._choose(receiver)
