"""The schedule `auto`: lists of actions that a search finds for given costs.

The search is greedy list scheduling. It simulates the pipeline: whenever a worker is free, the worker starts the most
urgent of the actions whose inputs have arrived and for whose activations there is room. A greedy choice may be bad for
later ones. So the search simulates many times, with several rules of urgency and with times that are slightly wrong on
purpose, and keeps the lists that are fastest with the correct times. (Qi et al., arXiv 2401.10241, §3, search among
heuristics in a similar way.)
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from distlab.pipeline.actions import KINDS, Action, ActionCosts, Programs, of_stage, stages_of
from distlab.pipeline.plan import simulate
from simplellm.errors import InputError, require

Move = tuple[str, int]  # letter and stage of an action on the next micro-batch
Times = dict[Move, float]  # seconds
Urgency = Callable[[str, str], int]  # (letter of an action, worker's last letter except W) -> smaller is more urgent

TRIES = 200  # simulations of a small pipeline
MOST_ACTIONS = 40_000  # in all simulations together, which take a second or two; but every rule is tried
ERROR = 0.15  # largest relative error of the times that are wrong on purpose
ROUNDING = 1e-9
BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9}

RULES: tuple[Urgency, ...] = (
    lambda letter, last: "IFW".index(letter),  # first the gradients that the previous stage waits for
    lambda letter, last: 2 if letter == "W" else letter == last,  # alternate F and I, as in DAPPLE
    lambda letter, last: "FIW".index(letter),  # as many forward passes ahead as there is room for
)


@dataclass(frozen=True)
class Limit:
    """The most activations that each worker may keep: in bytes, or in micro-batches of all its stages."""

    amount: float
    is_bytes: bool = False

    def __str__(self) -> str:
        return f"{self.amount / 1e6:g}MB" if self.is_bytes else f"{self.amount:g}"


def read_limit(text: str) -> Limit:
    """The limit in ``--keep-at-most``, such as "6" (micro-batches) or "200MB"; `InputError` for anything else."""
    found = re.fullmatch(rf"(\d+\.?\d*)({'|'.join(BYTES)})?", text)
    sentence = f"--keep-at-most {text}: give a number of micro-batches, like 6, or bytes, like 200MB"
    if found is None or not math.isfinite(float(found[1])):
        raise InputError(sentence)
    limit = Limit(float(found[1]) * BYTES.get(found[2], 1), is_bytes=found[2] is not None)
    require(limit.is_bytes or limit.amount >= 1, f"--keep-at-most {text}: give at least 1 micro-batch")
    require(limit.amount > 0, sentence)
    return limit


def stages_in_v(worker: int, workers: int) -> list[int]:
    """A worker's two stages where micro-batches pass the workers to the last and back, so the first has the loss."""
    return [worker, 2 * workers - 1 - worker]


def placement(workers: int, chunks: int) -> list[list[int]]:
    """The stages of each worker: one, or two in a V."""
    return [stages_in_v(worker, workers)[:chunks] for worker in range(workers)]


def keeps_at_most(limit: Limit, programs: Programs, costs: ActionCosts) -> bool:
    """Whether every worker of a schedule keeps to the limit."""
    held = [stages_of(program) for program in programs]
    sizes = _Sizes.of(costs, sum(map(len, held)), keeps_inputs=False)
    kept = simulate(programs, replace(costs, activation_bytes=sizes.bytes_of)).peak_bytes
    return all(peak <= sizes.amount(limit, own) * (1 + ROUNDING) for peak, own in zip(kept, held, strict=True))


def find_programs(
    workers: int,
    micro_batches: int,
    chunks: int,
    costs: ActionCosts,
    limit: Limit | None = None,
    tries: int | None = None,
    recompute: bool = False,
) -> list[list[Action]]:
    """The fastest lists of actions that were found, one for each worker; deterministic.

    Args:
        chunks: stages of each worker, 1 or 2.
        costs: times and sizes; without `activation_bytes`, all stages keep the same amount.
        limit: the most that each worker may keep; by default, as many micro-batches as there are workers, as in DAPPLE.
        tries: number of simulations; by default, as many as take about a second.
        recompute: the lists are for `with_recomputation`: a stage keeps its input, and computes the rest again while it
            waits for the gradient. A limit in bytes then counts these; one in micro-batches counts micro-batches of
            which anything is kept.

    Raises:
        InputError: a worker has no room for a single micro-batch.
    """
    held, stages, limit = placement(workers, chunks), workers * chunks, limit or Limit(workers)
    owners = {stage: worker for worker, own in enumerate(held) for stage in own}
    sizes = _Sizes.of(costs, stages, recompute and limit.is_bytes)
    for own in held:
        sizes.check(limit, own)
    limits = [sizes.amount(limit, own) for own in held]
    right = {(letter, stage): costs.seconds(KINDS[letter](stage, 0)) for letter in "FIW" for stage in range(stages)}
    again = [costs.seconds(KINDS["R"](stage, 0)) if recompute else 0.0 for stage in range(stages)]
    right |= {("I", stage): right["I", stage] + again[stage] for stage in range(stages)}
    tries = tries or max(4 * len(RULES), min(TRIES, MOST_ACTIONS // (len(right) * micro_batches)))
    least = max(
        sum(right["F", stage] + costs.transfer for stage in range(own[0]))
        + micro_batches * sum(right[letter, stage] for letter in "FIW" for stage in own)
        for own in held
    )  # a lower bound: each worker computes without a pause once its first input has arrived
    found: tuple[float, list[Move]] = math.inf, []
    for times, transfer, rule in itertools.islice(_guesses(right, costs.transfer), tries):
        moves = _play(held, micro_batches, _Clock(times, again, transfer, owners), sizes, limits, rule)
        clock = _Clock(right, again, costs.transfer, owners)
        for letter, stage in moves:
            clock.run(letter, stage)
        found = min(found, (max(clock.free), moves), key=lambda pair: pair[0])
        if found[0] <= least * (1 + ROUNDING):
            break
    programs: list[list[Action]] = [[] for _ in held]
    done = Counter[Move]()
    for letter, stage in found[1]:
        programs[owners[stage]].append(KINDS[letter](stage, done[letter, stage]))
        done[letter, stage] += 1
    return programs


def _guesses(right: Times, transfer: float) -> Iterator[tuple[Times, float, Urgency]]:
    """Times of actions, time of a message, and a rule, for each simulation; the correct times come first."""
    equal = {(letter, s): sum(right[each, s] for each in "FIW") / 3 for letter, s in right}
    bases = [(times, seconds) for times in (right, equal) for seconds in (transfer, 0.0)]
    yield from ((times, seconds, rule) for times, seconds in bases for rule in RULES)
    chance = Random(0)
    while True:
        (times, seconds), rule = chance.choice(bases), chance.choice(RULES)
        yield {key: time * chance.uniform(1 - ERROR, 1 + ERROR) for key, time in times.items()}, seconds, rule


@dataclass(frozen=True)
class _Sizes:
    """How much of a micro-batch each stage keeps: `bytes_of` by the costs, after F, before I, and after I."""

    bytes_of: Sequence[float]
    first: Sequence[float]
    whole: Sequence[float]
    factors: Sequence[float]

    @classmethod
    def of(cls, costs: ActionCosts, stages: int, keeps_inputs: bool) -> "_Sizes":
        bytes_of = [of_stage(costs.activation_bytes, stage) or 1.0 for stage in range(stages)]
        factors = [size * of_stage(costs.weight_bytes_share, stage) for stage, size in enumerate(bytes_of)]
        whole = [max(pair) for pair in zip(bytes_of, factors, strict=True)]
        inputs = [size * of_stage(costs.input_bytes_share, stage) for stage, size in enumerate(bytes_of)]
        return cls(bytes_of, inputs if keeps_inputs else whole, whole, factors)

    def again(self, stage: int) -> float:
        """What is added before I, because it has not been kept."""
        return self.whole[stage] - self.first[stage]

    def room(self, letter: str, stage: int, own: Sequence[int]) -> float:
        """What a worker with the stages `own` needs to start an action, so that it can go on in any case.

        A forward pass also needs room for its micro-batch on the worker's last stage, and for what is computed again
        before a backward pass.
        """
        if letter != "F":
            return self.again(stage) if letter == "I" else 0.0
        further = self.first[own[-1]] if stage != own[-1] else 0.0
        return self.first[stage] + further + max(map(self.again, own))

    def amount(self, limit: Limit, stages: Sequence[int]) -> float:
        """The limit of the worker that holds these stages, in the units of the sizes."""
        return limit.amount if limit.is_bytes else limit.amount * sum(self.whole[stage] for stage in stages)

    def check(self, limit: Limit, stages: Sequence[int]) -> None:
        """Raise `InputError` unless the worker that holds these stages has room for one micro-batch."""
        one = self.room("F", stages[0], stages)
        least = f"one micro-batch takes {one / 1e6:.4g} MB on stage {' and '.join(map(str, stages))}"
        require(not limit.is_bytes or limit.amount >= one, f"--keep-at-most {limit}: {least}; give more")


class _Clock:
    """Computes when actions run. Each stage runs the actions of a kind in the order of the micro-batches."""

    def __init__(self, times: Times, again: Sequence[float], transfer: float, owners: Mapping[int, int]) -> None:
        self.times, self._transfer, self._owners, self._last = times, transfer, owners, len(owners) - 1
        self._again = again  # by stage: the first seconds of I, which do not need the gradient
        self._ends: dict[Move, list[float]] = {move: [] for move in times}  # by micro-batch
        self.free = [0.0] * (1 + max(owners.values()))  # by worker: when its last action ends

    def done(self, letter: str, stage: int) -> int:
        """The number of micro-batches for which a stage has run this action."""
        return len(self._ends[letter, stage])

    def start(self, letter: str, stage: int) -> float:
        """When a stage can start its next action of a kind; infinity if an input has not been computed yet."""
        k = len(self._ends[letter, stage])
        start = self.free[self._owners[stage]]
        if letter == "F" and stage > 0:
            return max(start, self._arrival("F", stage - 1, stage, k))
        if letter == "I":
            start = max(start, self._arrival("F", stage, stage, k))
            if stage == self._last:
                return start
            return max(start, self._arrival("I", stage + 1, stage, k) - self._again[stage])
        return max(start, self._arrival("I", stage, stage, k)) if letter == "W" else start

    def _arrival(self, letter: str, source: int, taker: int, micro_batch: int) -> float:
        ends = self._ends[letter, source]
        if micro_batch >= len(ends):
            return math.inf
        return ends[micro_batch] + (self._transfer if self._owners[source] != self._owners[taker] else 0.0)

    def run(self, letter: str, stage: int) -> None:
        end = self.start(letter, stage) + self.times[letter, stage]
        self._ends[letter, stage].append(end)
        self.free[self._owners[stage]] = end


def _play(
    held: Sequence[Sequence[int]],
    micro_batches: int,
    clock: _Clock,
    sizes: _Sizes,
    limits: Sequence[float],
    rule: Urgency,
) -> list[Move]:
    """All actions, in the order in which they start if each worker chooses the most urgent one by a rule."""
    kept, last = [0.0] * len(held), [""] * len(held)

    def choose(worker: int) -> tuple[float, Move]:
        """What a worker starts next, and when. Of equally urgent actions, that of the stage nearest to the loss."""
        ready: list[tuple[float, int, int, Move]] = []
        for letter, stage in moves[worker]:
            room = rooms[letter, stage]
            is_possible = room == 0 or kept[worker] + room <= limits[worker] * (1 + ROUNDING)
            if is_possible and clock.done(letter, stage) < micro_batches:
                ready.append((clock.start(letter, stage), rule(letter, last[worker]), -stage, (letter, stage)))
        first = min((start for start, *_ in ready), default=math.inf)
        return first, min((choice for choice in ready if choice[0] <= first + ROUNDING), default=(0, 0, 0, ("", 0)))[-1]

    moves = [[(letter, stage) for stage in own for letter in "FIW"] for own in held]
    rooms = {(letter, stage): sizes.room(letter, stage, own) for own in held for stage in own for letter in "FIW"}
    owners = {stage: worker for worker, own in enumerate(held) for stage in own}
    choices = [choose(worker) for worker in range(len(held))]
    played: list[Move] = []
    for _ in range(len(owners) * 3 * micro_batches):
        worker = min(range(len(held)), key=lambda worker: choices[worker][0])
        letter, stage = choices[worker][1]
        clock.run(letter, stage)
        played.append((letter, stage))
        last[worker] = last[worker] if letter == "W" else letter
        first, factors = sizes.first[stage], sizes.factors[stage]
        kept[worker] += {"F": first, "I": factors - first, "W": -factors}[letter]
        waiting = owners.get(stage + {"F": 1, "I": -1, "W": 0}[letter], worker)
        for affected in {worker, waiting}:
            choices[affected] = choose(affected)
    return played
