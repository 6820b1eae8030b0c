"""Schedules of several pipelines in which workers are dead: others that hold the same stages do their work, too.

Micro-batches are numbered through all pipelines, and so are workers: with p workers and m micro-batches in each
pipeline, worker i * p + j is worker j of pipeline i, whose micro-batches are i * m, i * m + 1, …

The micro-batches of a dead worker go around among the workers that hold the same stages in other pipelines, as guests,
and from there back to its neighbors in its own pipeline. The others have idle time in which they can compute most of
them, if backward passes are split (ReCycle: Gandhi et al., arXiv 2405.14009). A split takes time itself; where workers
share few cores, others compute while one waits, and passes stay whole. The lists are found by playing the pipelines:
each worker runs, of what it can start first, a backward pass before a forward pass, and gradients of weights last. It
takes the messages of a link in the order in which they were sent. A worker has room for a limited number of
activations; survivors of a stage have more of it, for the micro-batches of the dead.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from distlab.pipeline.actions import (
    GRADIENTS,
    WEIGHT_GRADIENTS,
    Action,
    ActionCosts,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
    stages_of,
)
from distlab.pipeline.engine import NEVER, Engine, Graph
from distlab.pipeline.plan import Plan, simulate

SPLIT_GAINS = 0.98  # a step's time with split passes: with less gain, they are not worth what the split itself takes


def side_by_side(programs: Programs, pipelines: int) -> list[list[Action]]:
    """Return the lists of several pipelines that follow the same schedule, with their micro-batches numbered on."""
    count = 1 + max(action.micro_batch for program in programs for action in program)
    return [
        [replace(action, micro_batch=pipeline * count + action.micro_batch) for action in program]
        for pipeline in range(pipelines)
        for program in programs
    ]


def hosts_of(
    workers: int, micro_batches: int, pipelines: int, alive: Collection[int], whole: bool = False
) -> dict[tuple[int, int], int]:
    """Return, by (worker in its pipeline, micro-batch), the living worker that does the work.

    With `whole`, all micro-batches of a dead worker go to the same other worker.
    """
    hosts: dict[tuple[int, int], int] = {}
    for worker in range(workers):
        peers = [one for one in range(worker, pipelines * workers, workers) if one in alive]
        turns = itertools.count()
        for pipeline in range(pipelines):
            own = pipeline * workers + worker
            turn = itertools.repeat(next(turns)) if whole and own not in alive else turns
            for k in range(pipeline * micro_batches, (pipeline + 1) * micro_batches):
                hosts[worker, k] = own if own in alive else peers[next(turn) % len(peers)]
    return hosts


def reroute(
    programs: Programs,
    pipelines: int,
    alive: Sequence[int],
    costs: ActionCosts | None = None,
    whole: bool = False,
    cores: float = math.inf,
) -> list[list[Action]]:
    """Return the lists of the living workers, in their order, in which they also do the work of the dead.

    Args:
        programs: of one of the pipelines.
        alive: numbers of the living workers, ascending; at least one that holds each stage.
        costs: of actions and messages, for the simulation.
        whole: see `hosts_of`.
        cores: that the workers share.
    """
    if len(alive) == pipelines * len(programs):
        return side_by_side(programs, pipelines)
    costs, healthy = costs or ActionCosts(), simulate(programs)
    count = 1 + max(action.micro_batch for program in programs for action in program)
    hosts = hosts_of(len(programs), count, pipelines, alive, whole)
    holders = Counter(worker % len(programs) for worker in alive)
    room = [math.ceil(max(healthy.peak_live) * pipelines / holders[worker % len(programs)]) for worker in alive]

    def lines(kinds: Sequence[type[Action]]) -> list[list[Action]]:
        pool: dict[int, list[Action]] = {worker: [] for worker in alive}
        for (worker, k), host in sorted(hosts.items(), key=lambda item: (item[0][1] % count, item[0])):
            pool[host] += [kind(stage, k) for stage in stages_of(programs[worker]) for kind in kinds]
        return _play(Graph([pool[worker] for worker in alive], holders=pipelines), costs, room)

    unsplit, split = lines((Forward, Backward)), lines((Forward, BackwardInput, BackwardWeight))
    seconds = [step_seconds(simulate(found, costs, pipelines), cores) for found in (unsplit, split)]
    return split if seconds[1] < SPLIT_GAINS * seconds[0] else unsplit


def step_seconds(plan: Plan, cores: float) -> float:
    """Return how long a step takes at least, if workers share cores."""
    return max(plan.makespan, sum(span.end - span.start for line in plan.spans for span in line) / cores)


def _play(graph: Graph, costs: ActionCosts, room: Sequence[int]) -> list[list[Action]]:
    """Return the workers' actions in the order in which they run them."""
    # A message for which there is no room may block one behind it that would make room, if a link leads to two stages.
    for limits in (room, [len(line) for line in graph.lines]):
        played = Engine(graph, costs.seconds, lambda *_: (costs.transfer, 0.0), _GreedyActions(graph, limits))
        if len(played.begun) == len(graph.actions):
            break
    lines: list[list[Action]] = [[] for _ in graph.lines]
    for index in played.begun:
        lines[graph.workers[index]].append(graph.actions[index])
    return lines


class _GreedyActions:
    """Each worker runs the most urgent of the actions that can start first, if there is room for their activations."""

    def __init__(self, graph: Graph, room: Sequence[int]) -> None:
        self._graph, self._room = graph, [*room]  # of stages, by worker
        stages = [{graph.actions[index].stage for index in line} for line in graph.lines]
        self._first, self._held = [min(own) for own in stages], [len(own) for own in stages]
        self._takers: dict[int, list[int]] = {}
        for index, needs in enumerate(graph.needs):
            for need in needs:
                self._takers.setdefault(need, []).append(index)
        self._missing = [len(needs) for needs in graph.needs]  # inputs that are not on the way
        # By worker and source: the actions whose inputs are on the way, in the order in which they have to run.
        self._ways: list[dict[object, deque[int]]] = [{} for _ in graph.lines]
        self._way_of: dict[int, deque[int]] = {}
        for index, needs in enumerate(graph.needs):
            if not needs:
                self._add(index, "the data")

    def choose(self, engine: Engine, worker: int) -> tuple[float, int]:
        heads = [way[0] for way in self._ways[worker].values() if way]
        fitting = (index for index in heads if self._takes(index) <= self._room[worker])
        ready = [(engine.ready(index), self._urgency(index), index) for index in fitting]
        start, _, index = min(ready, default=(NEVER, (), -1))
        return start, index

    def begun(self, index: int) -> None:
        graph, worker = self._graph, self._graph.workers[index]
        self._way_of.pop(index).popleft()
        self._room[worker] -= self._takes(index)
        for taker in self._takers.get(index, ()):
            self._arrives(taker, graph.actions[index].letter)
        for message, link, _ in graph.sends[index]:
            for taker in self._takers[message]:
                self._arrives(taker, (link, graph.actions[index].letter))

    def _urgency(self, index: int) -> tuple[int, ...]:
        """Return which of the actions that can start at the same time goes first: the least."""
        action = self._graph.actions[index]
        return (0 if GRADIENTS in action.gives else 1 if isinstance(action, Forward) else 2), -action.stage

    def _takes(self, index: int) -> int:
        """Return the room that an action takes; a forward pass takes it for all stages of its worker."""
        action, worker = self._graph.actions[index], self._graph.workers[index]
        if isinstance(action, Forward):
            return self._held[worker] if action.stage == self._first[worker] else 0
        return -1 if WEIGHT_GRADIENTS in action.gives else 0

    def _arrives(self, index: int, source: object) -> None:
        self._missing[index] -= 1
        if not self._missing[index]:
            self._add(index, source)

    def _add(self, index: int, source: object) -> None:
        way = self._way_of[index] = self._ways[self._graph.workers[index]].setdefault(source, deque())
        way.append(index)
