"""A schedule in a form that is played quickly, for all layouts that follow it."""

import functools
import itertools
from collections import Counter
from dataclasses import dataclass

from distlab.pipeline.actions import Action, stages_of
from distlab.pipeline.engine import find_takers
from distlab_planner.layouts import Layout, programs_of

Key = tuple[str, int]  # letter, stage


@dataclass(frozen=True)
class Move:
    """An action in the order in which they can run, and its messages."""

    worker: int
    kind: int  # in `Graph.examples`
    needs: tuple[tuple[int, int], ...]  # what it waits for: (index of the other worker's action that sends it, worker)
    receivers: tuple[int, ...]  # workers that its results are sent to


@dataclass(frozen=True)
class Graph:
    """The actions of a schedule. Those of one kind cost the same, whatever their micro-batch."""

    owners: dict[int, int]  # by stage, its worker
    examples: list[Action]  # one of each kind
    kinds: list[list[int]]  # of each worker's actions, in order
    counts: list[Counter[int]]  # by worker, how many it has of each kind
    moves: list[Move]


def graph_of(layout: Layout) -> Graph:
    """The graph of a layout's schedule."""
    return _graph(layout.schedule, layout.pp, layout.micro_batches, layout.recompute == "all")


@functools.lru_cache(maxsize=64)
def _graph(schedule: str, workers: int, micro_batches: int, recompute: bool) -> Graph:
    programs = programs_of(schedule, workers, micro_batches, recompute)
    owners = {stage: worker for worker, program in enumerate(programs) for stage in stages_of(program)}
    kind_of: dict[Key, int] = {}
    examples: list[Action] = []
    kinds: list[list[int]] = [[] for _ in programs]
    for worker, program in enumerate(programs):
        for action in program:
            key = action.letter, action.stage
            if key not in kind_of:
                kind_of[key] = len(examples)
                examples.append(action)
            kinds[worker].append(kind_of[key])
    sent = find_takers(programs)
    moves: list[Move] = []
    given: dict[object, tuple[int, int]] = {}  # by result that another stage needs: its action's index and worker
    done = [0] * len(programs)
    total = sum(map(len, programs))
    while len(moves) < total:
        for worker, program in enumerate(programs):
            for action in itertools.islice(program, done[worker], None):
                needed = [result for result in action.needs(len(owners)) if owners[result.stage] != worker]
                if any(result not in given for result in needed):
                    break
                for result in action.results:
                    if result in sent:
                        given[result] = len(moves), worker
                takers = [owners[sent[result].stage] for result in action.results if result in sent]
                receivers = tuple(taker for taker in takers if taker != worker)
                needs = tuple(given[result] for result in needed)
                moves.append(Move(worker, kinds[worker][done[worker]], needs, receivers))
                done[worker] += 1
    return Graph(owners, examples, kinds, [Counter(line) for line in kinds], moves)
