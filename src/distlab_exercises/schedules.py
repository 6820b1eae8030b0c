"""Tries a function that returns a stage's order of forward and backward passes, before anything is trained with it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distlab.pipeline import schedules
from distlab.pipeline.actions import Action, Backward, Forward
from distlab.pipeline.engine import ScheduleError
from distlab.pipeline.plan import Plan, simulate
from distlab_exercises.loading import load
from distlab_exercises.verdict import Verdict

SIZES = [(1, 3), (2, 2), (2, 4), (3, 1), (3, 3), (3, 6), (4, 8)]  # stages, micro-batches


def try_schedule(script: Path, module: str, name: str) -> Verdict:
    """Compare the schedule `name` of a student's file with the library's: its order, duration and kept activations."""
    del module
    order: Callable[[int, int, int], object] = getattr(load(script), name)
    fits = schedules.SCHEDULES[name.replace("_", "-")].fits
    verdict = Verdict(f"{name}: its order, for up to 4 stages and 8 micro-batches")
    for stages, micro_batches in SIZES:
        if not fits(stages, micro_batches):
            continue
        found = _try_size(order, name, stages, micro_batches)
        if found is not None:
            mistake, sentence, programs = found
            where = f"{stages} stage{'s' * (stages > 1)}, {micro_batches} micro-batch{'es' * (micro_batches > 1)}"
            lines = [f"stage {s}: {' '.join(map(str, program))}" for s, program in enumerate(programs)]
            return verdict.fails(mistake, [f"{where}: {sentence}", *lines])
    verdict.passes("complete, without deadlock, as fast and as small as it can be")
    verdict.sentences.append(_peaks(order))
    return verdict


def _peaks(order: Callable[[int, int, int], Any]) -> str:
    """What each stage keeps at its peak, in the largest of the tried sizes."""
    stages, micro_batches = SIZES[-1]
    kept = simulate([order(stage, stages, micro_batches) for stage in range(stages)]).peak_live
    peaks = ", ".join(f"{count:g}" for count in kept)
    return f"{stages} stages, {micro_batches} micro-batches: they keep the activations of {peaks} micro-batches at most"


def _try_size(
    order: Callable[[int, int, int], object], name: str, stages: int, micro_batches: int
) -> tuple[str, str, list[list[Action]]] | None:
    programs: list[list[Action]] = []
    for stage in range(stages):
        program = order(stage, stages, micro_batches)
        if not isinstance(program, Sequence) or not all(isinstance(action, Action) for action in program):
            told = f"{name}({stage}, {stages}, {micro_batches}) returned {program!r:.80}"
            return "no-list", f"{told}; it must return a list of actions", programs
        programs.append(list(program))
        if absent := [action for action in programs[-1] if not 0 <= action.stage < stages]:
            told = f"stage {stage} runs {type(absent[0]).__name__} of a stage {absent[0].stage}, which does not exist"
            return "wrong-stage", f"{told}: Forward(stage, k) and Backward(stage, k) take the stage first", programs
    if not any(programs):
        return "empty", "the lists are empty", programs
    try:
        plan = simulate(programs)
    except ScheduleError as error:
        return ("deadlock" if "deadlock" in str(error) else "wrong-order"), str(error), programs
    if plan.owners != {stage: stage for stage in range(stages)}:
        return "wrong-stage", "each stage must run its own actions: Forward(stage, k), with its own number", programs
    if max(action.micro_batch for program in programs for action in program) + 1 != micro_batches:
        held = max(action.micro_batch for program in programs for action in program) + 1
        return (
            "micro-batches",
            f"the lists hold {held} micro-batch{'es' * (held > 1)} instead of {micro_batches}",
            programs,
        )
    library = simulate([vars(schedules)[name](stage, stages, micro_batches) for stage in range(stages)])
    return (found := _compare(name, plan, library, programs)) and (*found, programs)


def _compare(name: str, plan: Plan, library: Plan, programs: list[list[Action]]) -> tuple[str, str] | None:
    if name == "gpipe":
        for stage, program in enumerate(programs):
            first = next(index for index, action in enumerate(program) if isinstance(action, Backward))
            late = next((action for action in program[first:] if isinstance(action, Forward)), None)
            if late is not None:
                return (
                    "not-gpipe",
                    f"stage {stage} runs {program[first]} before {late}; GPipe runs all forward passes first",
                )
    for stage, (kept, least) in enumerate(zip(plan.peak_live, library.peak_live, strict=True)):
        if kept > least:
            told = f"stage {stage} keeps the activations of {kept} micro-batches at a time, and needs to keep {least}"
            return "keeps-too-much", f"{told} at most: run a backward pass before the next forward pass"
    if plan.makespan > library.makespan + 1e-9:
        longest = max(range(len(plan.bubble)), key=lambda stage: plan.bubble[stage])
        told = f"it takes {plan.makespan:g} units of time (a forward pass is 1, a backward pass 2)"
        return "slow", f"{told}, and {library.makespan:g} are enough: stage {longest} is idle for too long"
    return None
