"""The schedule of a layout in the form for the simulation; layouts with the same schedule share it."""

import functools
from collections import Counter
from dataclasses import dataclass

from distlab.pipeline.actions import Action, ActionCosts, Program, Programs, Result, stages_of
from distlab.pipeline.engine import Graph, LinkKey
from distlab_planner.layouts import RunLayout, programs_of

ActionKind = tuple[str, int]  # letter, stage: actions of a kind cost the same, whatever their micro-batch


class BeforePasses(Action):
    """The work of a step before a worker's passes, as far as others do not wait for it."""

    letter = "<"

    def needs(self, stages: int) -> list[Result]:
        return []

    def seconds(self, costs: ActionCosts) -> float:
        return 0.0


class AfterPasses(BeforePasses):
    """The work of a step after a worker's passes."""

    letter = ">"


@dataclass(frozen=True)
class StepGraph:
    """The actions of a step."""

    programs: Programs
    kinds: list[list[ActionKind]]  # of each worker's program, in order
    counts: list[Counter[ActionKind]]  # by worker, the number of its actions of each kind
    examples: dict[ActionKind, Action]

    @functools.cached_property
    def graph(self) -> Graph:
        """Each worker's program, with an action before and one after it."""
        return Graph([_with_ends(program) for program in self.programs])

    @functools.cached_property
    def messages_by_kind(self) -> dict[ActionKind, int]:
        """The number of messages that an action of each kind waits for and sends."""
        numbers = {(action.letter, action.stage): index for index, action in enumerate(self.graph.actions)}
        return {kind: self.graph.receives(index) + len(self.graph.sends[index]) for kind, index in numbers.items()}

    @functools.cached_property
    def messages_by_link(self) -> dict[LinkKey, int]:
        """The number of messages over each link."""
        return {link: len(messages) for link, messages in self.graph.messages().items()}


def graph_of(layout: RunLayout) -> StepGraph:
    """Return the actions of a step of a layout."""
    return _graph(layout.schedule, layout.size("pp"), layout.micro_batches, layout.recompute == "all")


@functools.lru_cache(maxsize=64)
def _graph(schedule: str, workers: int, micro_batches: int, recompute: bool) -> StepGraph:
    programs = programs_of(schedule, workers, micro_batches, recompute)
    kinds = [[(action.letter, action.stage) for action in program] for program in programs]
    examples = {(action.letter, action.stage): action for program in programs for action in program}
    return StepGraph(programs, kinds, [Counter(line) for line in kinds], examples)


def _with_ends(program: Program) -> Program:
    first = stages_of(program)[0]
    return [BeforePasses(first, 0), *program, AfterPasses(first, 0)]
