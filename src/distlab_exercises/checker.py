"""Runs all trials of an exercise with a student's file."""

import ast
import gc
import importlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from distlab_exercises import training
from distlab_exercises.attention import PARTS, try_labels, try_merge, try_ring
from distlab_exercises.catalogue import EXERCISES, Exercise
from distlab_exercises.checkpoints import try_checkpoint
from distlab_exercises.classifier import try_classifier
from distlab_exercises.collectives import try_collective
from distlab_exercises.exhibits import Exhibit
from distlab_exercises.experts import RANKS, try_dispatch, try_norm, try_permutation, try_scale
from distlab_exercises.layers import try_conjugate, try_layer
from distlab_exercises.loading import Solution
from distlab_exercises.museum import try_exhibit
from distlab_exercises.over_mpi import try_function, try_method
from distlab_exercises.programs import try_case, try_product
from distlab_exercises.ranks import Facts, Patience, Submission, raise_trouble
from distlab_exercises.schedules import try_schedule
from distlab_exercises.skeleton import write_out
from distlab_exercises.submissions import OF_THE_LAB
from distlab_exercises.verdict import Verdict, Wrong

Attempt = Callable[[Solution], list[str]]  # tries a function on a rank: raises `Wrong`, or returns what is right
# How functions are tried: number of ranks, what each does, description.
FUNCTIONS: dict[str, tuple[int, Attempt, str]] = {
    "schedule": (1, try_schedule, "its order, for up to 4 stages and 8 micro-batches"),
    "collective": (1, try_collective, "2 to 8 ranks"),  # of a simulated world, like MPI's
    "mpi": (1, try_function, "4 ranks in three grids"),
    "mpi-collective": (1, try_method, "1 to 4 ranks"),
    "checkpoint": (1, try_checkpoint, "written and read in four layouts"),
    "classifier": (1, try_classifier, "three layers, three steps"),
    "product": (3, try_product, "3 ranks"),
    "case": (3, try_case, "3 ranks"),
    "conjugate": (2, try_conjugate, "2 ranks, forward and backward"),
    "layer": (2, try_layer, "2 ranks"),
    "labels": (1, try_labels, f"the positions of {PARTS} ranks"),
    "merge": (1, try_merge, "two blocks of keys, and very large numbers"),
    "permutation": (1, try_permutation, "permutations of 4, 0 and 1,000 rows"),
    "scale": (RANKS, try_scale, f"{RANKS} ranks, a dense weight and an expert on each"),
    "norm": (RANKS, try_norm, f"{RANKS} ranks, a dense weight and an expert on each"),
    "dispatch": (RANKS, try_dispatch, f"{RANKS} ranks, of which one has no rows"),
    "ring": (PARTS, try_ring, f"{PARTS} ranks, with and without documents"),
}
SECONDS_AFTER_A_DEADLOCK = 3.0  # for ranks to stand still, or compute, after a deadlock of another function


def prepare(exercises: Iterable[Exercise | Exhibit] = EXERCISES.values()) -> None:
    """Do the common work of all forked ranks once: import the modules that files import, read the generator's stories.

    This process computes with one thread, as forks inherit no others.

    Args:
        exercises: the exercises that will be checked.
    """
    import torch

    importlib.import_module("distlab.run.joining")  # for ranks that meet
    exercises = list(exercises)
    for exercise in exercises:
        _import_modules_of(exercise)
    if any("pp" in trial.layout for exercise in exercises for trial in exercise.trials):
        import torch._dynamo  # for a stage that gets gradients: takes seconds
    torch.set_num_threads(1)
    training.prepare()
    gc.collect()
    gc.freeze()  # or the collector would write to every object, and thus copy the memory shared with the forks


def _import_modules_of(exercise: Exercise | Exhibit) -> None:
    """Import the lab's modules that the right solution of an exercise, or the script of an exhibit, imports."""
    if isinstance(exercise, Exercise):
        text = write_out(exercise, Path(exercise.file_name), solved=True)
    else:
        text = "\n".join(exercise.lines())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and OF_THE_LAB.fullmatch(node.module or ""):
            importlib.import_module(node.module or "")


def check(exercise: Exercise, script: Path, patience: Patience | None = None) -> Iterator[Verdict]:
    """Yield the verdicts on a file, trial by trial; nothing is trained after a trial has failed."""
    patience, passed = patience or Patience(), True
    with tempfile.TemporaryDirectory(prefix="lab-check-") as name:
        for number, trial in enumerate([*exercise.tried, *exercise.trials]):
            folder = Path(name, str(number))
            folder.mkdir()
            submission = Submission(script.resolve(), folder, patience)
            if isinstance(trial, str):
                ranks, attempt, about = FUNCTIONS[exercise.functions]
                function = trial.rpartition(":")[2]
                verdict = _judge(Verdict(f"{function}: {about}"), _try_function, submission, ranks, attempt, trial)
            elif passed:
                verdict = _judge(Verdict(f"train: {trial}"), training.try_layout, submission, exercise, trial)
            else:
                return
            passed = passed and verdict.passed
            if verdict.mistake == "deadlock":  # the result is clear, and other trials may hang as well
                most = SECONDS_AFTER_A_DEADLOCK
                patience = replace(patience, still=min(patience.still, most), work=min(patience.work, most))
            yield verdict


def verdict_of(exhibit: Exhibit, script: Path, patience: Patience | None = None) -> Verdict:
    """Return the verdict on a corrected exhibit."""
    with tempfile.TemporaryDirectory(prefix="lab-find-") as name:
        submission = Submission(script.resolve(), Path(name), patience or Patience())
        return _judge(Verdict(f"train: {exhibit.trial}"), try_exhibit, submission, exhibit)


def _judge(verdict: Verdict, trial: Callable[..., None], submission: Submission, *args: object) -> Verdict:
    started = time.monotonic()
    try:
        trial(verdict, submission, *args)
        verdict.passed = True
    except Wrong as wrong:
        verdict.mistake, verdict.sentences = wrong.mistake, list(wrong.sentences)
        verdict.printed = submission.printed()
    verdict.seconds = round(time.monotonic() - started, 2)
    return verdict


def _try_function(verdict: Verdict, submission: Submission, ranks: int, attempt: Attempt, taken: str) -> None:
    reports = submission.run_ranks(ranks, _on_rank, attempt, taken)
    raise_trouble(reports)
    verdict.sentences = reports[0].facts["right"]


def _on_rank(rank: int, submission: Submission, attempt: Attempt, taken: str) -> Facts:
    return {"right": attempt(Solution(rank, submission, taken))}
