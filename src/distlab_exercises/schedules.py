"""Tries a function that returns a stage's order of forward and backward passes, before anything is trained with it."""

from collections.abc import Callable, Sequence
from typing import Any

from distlab.pipeline import schedules
from distlab.pipeline.actions import Action, Backward, Forward
from distlab.pipeline.engine import ScheduleError
from distlab.pipeline.plan import simulate
from distlab_exercises.loading import Solution
from distlab_exercises.verdict import Wrong, expect

SIZES = [(1, 3), (2, 2), (2, 4), (3, 1), (3, 3), (3, 6), (4, 8)]  # stages, micro-batches


def try_schedule(solution: Solution) -> list[str]:
    """Compare a schedule of a student's file with the library's: its order, duration and kept activations."""
    name, order = solution.name, solution.function
    library = getattr(schedules, name)
    for stages, micro_batches in SIZES:
        if not schedules.SCHEDULES[name.replace("_", "-")].fits(stages, micro_batches):
            continue
        programs: list[list[Action]] = []
        size = f"{stages} stage{'s' * (stages > 1)}, {micro_batches} micro-batch{'es' * (micro_batches > 1)}"
        try:
            _try_size(order, library, stages, micro_batches, programs)
        except Wrong as wrong:
            lines = [f"stage {s}: {' '.join(map(str, program))}" for s, program in enumerate(programs)]
            raise Wrong(wrong.mistake, f"{size}: {wrong.sentences[0]}", *lines) from wrong
    peaks = ", ".join(f"{count:g}" for count in simulate(programs).peak_live)
    kept = f"{stages} stages, {micro_batches} micro-batches: they keep the activations of {peaks} micro-batches at most"
    return ["complete, without deadlock, as fast and as small as it can be", kept]


def _try_size(
    order: Callable[[int, int, int], Any],
    library: Callable[[int, int, int], list[Action]],
    stages: int,
    micro_batches: int,
    programs: list[list[Action]],
) -> None:
    name = library.__name__
    right = [library(stage, stages, micro_batches) for stage in range(stages)]
    for stage in range(stages):
        program = order(stage, stages, micro_batches)
        told = f"{name}({stage}, {stages}, {micro_batches}) returned {program!r:.80}; it must return a list of actions"
        is_list = isinstance(program, Sequence) and all(isinstance(action, Action) for action in program)
        expect(is_list, "no-list", told)
        programs.append(list(program))
    expect(any(programs), "empty", "the lists are empty")
    for stage, program in enumerate(programs):
        held = {action.micro_batch for action in program if action.micro_batch >= micro_batches}
        expect(not held, "micro-batches", f"stage {stage} has a micro-batch {max(held, default=0)}, of {micro_batches}")
        other = next((action for action in program if action.stage != stage), None)
        if other is not None:
            told = f"stage {stage} runs {type(other).__name__} of a stage {other.stage}"
            told += ", which does not exist" * (not 0 <= other.stage < stages)
            raise Wrong(
                "wrong-stage", f"{told}: Forward(stage, k) and Backward(stage, k) take the stage first, its own"
            )
        lacks = [action for action in right[stage] if action not in program]
        expect(not lacks, "missing", f"stage {stage} lacks {' and '.join(map(str, lacks))}")
    try:
        plan = simulate(programs)
    except ScheduleError as error:
        raise Wrong("deadlock" if "deadlock" in str(error) else "wrong-order", str(error)) from error
    if name == "gpipe":
        for stage, program in enumerate(programs):
            first = next(index for index, action in enumerate(program) if isinstance(action, Backward))
            if (late := next((action for action in program[first:] if isinstance(action, Forward)), None)) is not None:
                told = f"stage {stage} runs {program[first]} before {late}; GPipe runs all forward passes first"
                raise Wrong("not-gpipe", told)
    best = simulate(right)
    for stage, (kept, least) in enumerate(zip(plan.peak_live, best.peak_live, strict=True)):
        told = f"stage {stage} keeps the activations of {kept} micro-batches at a time, and needs to keep {least}"
        expect(kept <= least, "keeps-too-much", f"{told} at most: run a backward pass before the next forward pass")
    told = f"it takes {plan.makespan:g} units of time (a forward pass is 1, a backward pass 2)"
    slow = f"{told}, and {best.makespan:g} are enough: stages are idle for too long"
    expect(plan.makespan <= best.makespan + 1e-9, "slow", slow)
