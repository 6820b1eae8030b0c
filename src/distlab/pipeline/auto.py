"""The schedule `auto`: lists of actions that a search finds for given costs.

The search is greedy list scheduling. It plays the pipeline (`engine`): whenever a worker is free, the worker starts the
most urgent of the actions whose inputs have arrived and for whose activations there is room. A greedy choice may be bad
for later ones. So the search plays many times, with several rules of urgency and with times that are deliberately
slightly wrong, and keeps the lists that are fastest with the correct times. (Qi et al., arXiv 2401.10241, §3, search
among heuristics in a similar way.)
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from distlab.axes.layout import name_stages
from distlab.pipeline.actions import (
    ACTIVATIONS,
    GRADIENTS,
    Action,
    ActionCosts,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardAgain,
    ForwardKeepingInput,
    Program,
    Programs,
    of_stage,
    stages_of,
)
from distlab.pipeline.engine import NEVER, Engine, Graph, InOrder
from distlab.pipeline.plan import ROUNDING, simulate
from simplellm.errors import InputError, require

# The work of a stage on a micro-batch: its passes, in order, the forward pass first. A pass is one action, or several
# in a row that start early enough for the last of them not to wait.
Passes = Sequence[tuple[type[Action], ...]]
Times = dict[tuple[int, int], float]  # seconds, by (place in the passes, stage)
Urgency = Callable[[int, int], int]  # (kind that a pass sends, kind that the worker sent last) -> lower is first

PASSES: Passes = ((Forward,), (BackwardInput,), (BackwardWeight,))
RECOMPUTING: Passes = ((ForwardKeepingInput,), (ForwardAgain, BackwardInput), (BackwardWeight,))
SENDS_GRADIENTS, SENDS_ACTIVATIONS, SENDS_NOTHING = range(3)

TRIES = 200  # simulations of a small pipeline
MOST_ACTIONS = 40_000  # in all simulations together, which take a second or two; but every rule is tried
ERROR = 0.15  # largest relative error of the deliberately wrong times
BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9}

RULES: tuple[Urgency, ...] = (
    lambda sent, _: sent,  # first the gradients that the previous stage waits for
    lambda sent, last: sent if sent == SENDS_NOTHING else sent == last,  # alternate F and I, as in DAPPLE
    lambda sent, _: (1, 0, 2)[sent],  # as many forward passes ahead as there is room for
)


@dataclass(frozen=True)
class Limit:
    """The maximum of activations that each worker may keep: in bytes, or in micro-batches of all its stages."""

    amount: float
    is_bytes: bool = False

    def __str__(self) -> str:
        return f"{self.amount / 1e6:g}MB" if self.is_bytes else f"{self.amount:g}"


def read_limit(text: str) -> Limit:
    """Read ``--keep-at-most``, such as "6" (micro-batches) or "200MB"; `InputError` for anything else."""
    found = re.fullmatch(rf"(\d+\.?\d*)({'|'.join(BYTES)})?", text)
    sentence = f"--keep-at-most {text}: give a number of micro-batches, like 6, or bytes, like 200MB"
    if found is None or not math.isfinite(float(found[1])):
        raise InputError(sentence)
    limit = Limit(float(found[1]) * BYTES.get(found[2], 1), is_bytes=found[2] is not None)
    require(limit.is_bytes or limit.amount >= 1, f"--keep-at-most {text}: give at least 1 micro-batch")
    require(limit.amount > 0, sentence)
    return limit


def stages_in_v(worker: int, workers: int) -> list[int]:
    """Return a worker's two stages in a V: micro-batches go to the last worker and back, so the first has the loss."""
    return [worker, 2 * workers - 1 - worker]


def placement(workers: int, chunks: int) -> list[list[int]]:
    """Return the stages of each worker: one, or two in a V."""
    return [stages_in_v(worker, workers)[:chunks] for worker in range(workers)]


def keeps_at_most(limit: Limit, programs: Programs, costs: ActionCosts) -> bool:
    """Return whether every worker of a schedule keeps to the limit."""
    held = [stages_of(program) for program in programs]
    costs = _with_sizes(costs, sum(map(len, held)))
    kept = simulate(programs, costs).peak_bytes
    return all(peak <= _most_bytes(limit, own, PASSES, costs) for peak, own in zip(kept, held, strict=True))


def find_programs(
    workers: int,
    micro_batches: int,
    chunks: int,
    costs: ActionCosts,
    limit: Limit | None = None,
    tries: int | None = None,
    recompute: bool = False,
    passes: Passes = PASSES,
) -> list[list[Action]]:
    """Search for the fastest lists of actions, and return one for each worker; deterministic.

    Args:
        chunks: stages of each worker, 1 or 2.
        costs: times and sizes; without `activation_bytes`, all stages keep the same amount.
        limit: the most that each worker may keep; by default, as many micro-batches as there are workers, as in DAPPLE.
        tries: number of simulations; by default, as many as take about a second.
        recompute: the lists are for `with_recomputation`: a stage keeps its input, and computes the rest again while it
            waits for the gradient. A limit in bytes then counts these; one in micro-batches counts micro-batches of
            which anything is kept.
        passes: the actions, of any kind, of each stage on each micro-batch.

    Raises:
        InputError: a worker has no room for a single micro-batch.
    """
    held, limit = placement(workers, chunks), limit or Limit(workers)
    counted = RECOMPUTING if recompute and limit.is_bytes else passes
    passes = RECOMPUTING if recompute else passes
    pool = _Pool(held, micro_batches, passes)
    pool.set_room(limit, counted, _with_sizes(costs, workers * chunks))
    graph, places = pool.graph, range(len(passes))
    stages = range(workers * chunks)
    right = {(p, stage): sum(costs.seconds(kind(stage, 0)) for kind in passes[p]) for p in places for stage in stages}
    tries = tries or max(4 * len(RULES), min(TRIES, MOST_ACTIONS // (len(right) * micro_batches)))
    least = max(
        sum(right[0, stage] + costs.transfer for stage in range(own[0]))
        + micro_batches * sum(right[place, stage] for place in places for stage in own)
        for own in held
    )  # a lower bound: each worker computes without a pause once its first input has arrived
    found: tuple[float, list[list[int]]] = math.inf, []
    for times, transfer, rule in itertools.islice(_guesses(right, costs.transfer), tries):
        guess = Engine(graph, _seconds_by(times, passes, costs), _messages(transfer), _GreedyPasses(pool, rule))
        lines: list[list[int]] = [[] for _ in held]
        for index in guess.begun:
            lines[graph.workers[index]].append(index)
        played = Engine(graph, costs.seconds, _messages(costs.transfer), InOrder(graph, lines))
        found = min(found, (played.makespan, lines), key=lambda pair: pair[0])
        if found[0] <= least * (1 + ROUNDING):
            break
    programs = [[graph.actions[index] for index in line] for line in found[1]]
    return [_without_recomputation(program) for program in programs] if recompute else programs


def _without_recomputation(program: Program) -> list[Action]:
    plain = (Forward(a.stage, a.micro_batch) if isinstance(a, ForwardKeepingInput) else a for a in program)
    return [action for action in plain if not isinstance(action, ForwardAgain)]


def _messages(seconds: float) -> Callable[[int, int], tuple[float, float]]:
    return lambda *_: (seconds, 0.0)


def _seconds_by(times: Times, passes: Passes, costs: ActionCosts) -> Callable[[Action], float]:
    """Return the seconds of an action in passes of these times; recomputation takes its usual time."""
    seconds: dict[tuple[type[Action], int], float] = {}
    for (place, stage), total in times.items():
        *first, last = passes[place]
        seconds |= {(kind, stage): costs.seconds(kind(stage, 0)) for kind in first}
        seconds[last, stage] = total - sum(seconds[kind, stage] for kind in first)
    return lambda action: seconds[type(action), action.stage]


def _guesses(right: Times, transfer: float) -> Iterator[tuple[Times, float, Urgency]]:
    """Yield times of passes, time of a message, and a rule, for each simulation; the correct times come first."""
    count = 1 + max(place for place, _ in right)
    equal = {(place, stage): sum(right[each, stage] for each in range(count)) / count for place, stage in right}
    bases = [(times, seconds) for times in (right, equal) for seconds in (transfer, 0.0)]
    yield from ((times, seconds, rule) for times, seconds in bases for rule in RULES)
    chance = Random(0)
    while True:
        (times, seconds), rule = chance.choice(bases), chance.choice(RULES)
        yield {key: time * chance.uniform(1 - ERROR, 1 + ERROR) for key, time in times.items()}, seconds, rule


def _with_sizes(costs: ActionCosts, stages: int) -> ActionCosts:
    """Return costs in which every stage keeps something."""
    return replace(costs, activation_bytes=[of_stage(costs.activation_bytes, stage) or 1.0 for stage in range(stages)])


def _levels(stage: int, passes: Passes, costs: ActionCosts) -> list[tuple[float, float, float]]:
    """Return the bytes that a stage keeps of a micro-batch before, at most during, and after each pass."""
    levels, after = list[tuple[float, float, float]](), 0.0
    for kinds in passes:
        before = after
        during = list(itertools.accumulate((costs.kept_bytes(kind(stage, 0)) for kind in kinds), initial=before))
        after = during[-1]
        levels.append((before, max(during), after))
    return levels


def _most_bytes(limit: Limit, stages: Sequence[int], passes: Passes, costs: ActionCosts) -> float:
    """Return the bytes that the worker with these stages may keep."""
    whole = sum(max(most for _, most, _ in _levels(stage, passes, costs)) for stage in stages)
    return (limit.amount if limit.is_bytes else limit.amount * whole) * (1 + ROUNDING)


@dataclass
class _Queue:
    """A stage's passes of one kind, which run in the order of the micro-batches."""

    stage: int
    sends: int
    passes: list[range]  # the actions of each pass
    added: float = 0.0  # bytes, by each pass
    room: float = 0.0  # bytes that its worker needs to start one, so that it can go on in any case

    def start(self, engine: Engine, number: int) -> float:
        """Return when a pass can start, such that its last action need not wait."""
        actions, before = self.passes[number], 0.0
        start = engine.ready(actions[0])
        for index in actions[1:]:
            before += engine.alone[index - 1]
            for need in engine.graph.needs[index]:
                if need not in actions and engine.ends[need] - before > start:
                    start = engine.ends[need] - before
        return start


class _Pool:
    """All passes of a pipeline; each worker runs its own in some order."""

    def __init__(self, held: Sequence[Sequence[int]], micro_batches: int, passes: Passes) -> None:
        self.held, actions, self.queues = held, list[list[Action]](), list[list[_Queue]]()
        for own in held:
            actions.append([])
            self.queues.append([])
            for stage, kinds in itertools.product(own, passes):
                first = sum(map(len, actions))
                actions[-1] += [kind(stage, k) for k in range(micro_batches) for kind in kinds]
                starts = range(first, sum(map(len, actions)), len(kinds))
                queue = _Queue(stage, _sent_by(kinds), [range(start, start + len(kinds)) for start in starts])
                self.queues[-1].append(queue)
        self.graph = Graph(actions)

    def set_room(self, limit: Limit, passes: Passes, costs: ActionCosts) -> None:
        """Set the room that passes need, as long as every worker keeps to the limit.

        A forward pass also needs room for its micro-batch on the worker's last stage, and for later passes.
        """
        self.most_bytes = [_most_bytes(limit, own, passes, costs) for own in self.held]
        for own, queues in zip(self.held, self.queues, strict=True):
            levels = [level for stage in own for level in _levels(stage, passes, costs)]
            for queue, (before, most, after) in zip(queues, levels, strict=True):
                queue.added, queue.room = after - before, most - before
            forward = queues[:: len(passes)]
            one = forward[-1].room
            later = max(queue.room for queue in queues if queue not in forward)
            for queue in forward:
                queue.room += later + (one if queue is not forward[-1] else 0.0)
            least = f"one micro-batch takes {queues[0].room / 1e6:.4g} MB on {name_stages(own)}"
            is_enough = not limit.is_bytes or limit.amount >= queues[0].room
            require(is_enough, f"--keep-at-most {limit}: {least}; give more")


def _sent_by(kinds: Sequence[type[Action]]) -> int:
    given = {result for kind in kinds for result in kind.gives}
    return SENDS_GRADIENTS if GRADIENTS in given else SENDS_ACTIVATIONS if ACTIVATIONS in given else SENDS_NOTHING


class _GreedyPasses:
    """Each worker runs the most urgent of the passes that can start first, if there is room for their activations.

    Among equally urgent passes, it runs the one of the stage nearest to the loss.
    """

    def __init__(self, pool: _Pool, rule: Urgency) -> None:
        self._pool, self._rule = pool, rule
        self._done = [[0] * len(queues) for queues in pool.queues]  # passes
        self._kept, self._last = [0.0] * len(pool.queues), [-1] * len(pool.queues)
        self._chosen, self._rest = [0] * len(pool.queues), [range(0)] * len(pool.queues)  # a queue; of a pass

    def choose(self, engine: Engine, worker: int) -> tuple[float, int]:
        if self._rest[worker]:  # at once, so that others know when its results will be there
            return engine.starts[self._rest[worker][0] - 1], self._rest[worker][0]
        ready: list[tuple[float, int, int, int]] = []
        left, last = self._pool.most_bytes[worker] - self._kept[worker], self._last[worker]
        for number, (queue, done) in enumerate(zip(self._pool.queues[worker], self._done[worker], strict=True)):
            if done < len(queue.passes) and (queue.room <= left or queue.room == 0):
                ready.append((queue.start(engine, done), self._rule(queue.sends, last), -queue.stage, number))
        if not ready:
            return NEVER, -1
        start, _, _, number = min(ready)
        self._chosen[worker] = number
        return start, self._pool.queues[worker][number].passes[self._done[worker][number]][0]

    def begun(self, index: int) -> None:
        worker = self._pool.graph.workers[index]
        if self._rest[worker]:
            self._rest[worker] = self._rest[worker][1:]
            return
        number = self._chosen[worker]
        queue = self._pool.queues[worker][number]
        self._rest[worker] = queue.passes[self._done[worker][number]][1:]
        self._done[worker][number] += 1
        self._kept[worker] += queue.added
        if queue.sends != SENDS_NOTHING:
            self._last[worker] = queue.sends
