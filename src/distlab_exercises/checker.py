"""Runs all trials of an exercise with a student's file."""

import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from distlab_exercises import training
from distlab_exercises.catalogue import EXERCISES, Exercise
from distlab_exercises.checkpoints import try_checkpoint
from distlab_exercises.classifier import try_classifier
from distlab_exercises.collectives import try_collective
from distlab_exercises.layers import try_layer
from distlab_exercises.over_mpi import try_method, try_mpi
from distlab_exercises.programs import try_case, try_product
from distlab_exercises.ranks import Facts, Patience, Submission, trouble
from distlab_exercises.schedules import try_schedule
from distlab_exercises.training import try_layout
from distlab_exercises.verdict import Verdict

FUNCTIONS: dict[str, Callable[[Path, str, str], Verdict]] = {
    "schedule": try_schedule,
    "collective": try_collective,
    "checkpoint": try_checkpoint,
    "classifier": try_classifier,
    "mpi": try_mpi,
    "mpi-collective": try_method,
}  # in one process
PROGRAMS = {"product": try_product, "case": try_case, "layer": try_layer}  # on several ranks
SECONDS_AFTER_A_DEADLOCK = 3.0  # that ranks may stand still, or compute, where another function has ended in one


def prepare(exercises: Iterable[Exercise] = EXERCISES.values()) -> None:
    """Do once what every forked rank would do anew: import what ranks import as they run, read the generator's stories.

    This process computes with one thread, as forks inherit no others.

    Args:
        exercises: those that will be checked.
    """
    import torch

    if any("pp" in trial.layout for exercise in exercises for trial in exercise.trials):
        import torch._dynamo  # for a stage that is given gradients: seconds
    torch.set_num_threads(1)
    training.prepare()
    gc.collect()
    gc.freeze()  # or the collector would write to every object, and so copy the memory that forks share


def check(exercise: Exercise, script: Path, patience: Patience | None = None) -> Iterator[Verdict]:
    """The verdicts on a file, trial by trial; nothing is trained after a trial has failed."""
    patience, script = patience or Patience(), script.resolve()
    with tempfile.TemporaryDirectory(prefix="lab-check-") as name:
        folder, passed = Path(name), True
        for taken in exercise.tried:
            verdict = _timed(_try_function, exercise.functions, taken, Submission(script, folder, patience))
            passed = passed and verdict.passed
            if verdict.mistake == "deadlock":  # the result is clear, and others may hang, too
                most = SECONDS_AFTER_A_DEADLOCK
                patience = replace(patience, still=min(patience.still, most), work=min(patience.work, most))
            yield verdict
        for number, trial in enumerate(exercise.trials):
            if passed:
                own = folder / f"trial{number}"
                verdict = _timed(try_layout, exercise, trial, Submission(script, own, patience))
                passed = verdict.passed
                yield verdict


def _timed(trial: Callable[..., Verdict], *args: Any) -> Verdict:
    started = time.monotonic()
    verdict = trial(*args)
    verdict.seconds = round(time.monotonic() - started, 2)
    return verdict


def _try_alone(rank: int, script: Path, kind: str, module: str, name: str) -> Facts:
    del rank
    return FUNCTIONS[kind](script, module, name).to_json()


def _try_function(kind: str, taken: str, submission: Submission) -> Verdict:
    """Try a function of an exercise."""
    module, _, name = taken.rpartition(":")
    if kind in PROGRAMS:
        return PROGRAMS[kind](name, submission)
    reports = submission.run_ranks(1, _try_alone, kind, module, name)
    if found := trouble(reports):
        return Verdict(name).fails(*found, printed=reports)
    verdict = Verdict(**reports[0].facts)
    verdict.printed = [] if verdict.passed else reports[0].printed[-10:]
    return verdict
