"""Attempts at exercises: what a student may hand in, and what the checker has to say about it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from distlab_exercises.catalogue import EXERCISES, Exercise, Trial
from distlab_exercises.checker import check
from distlab_exercises.ranks import Patience
from distlab_exercises.skeleton import write_out

PATIENCE, SHORT_PATIENCE = Patience(still=8, longest=20), Patience(still=0.5, longest=20)  # the latter for deadlocks
TWO_REPLICAS = Trial({"dp": 2}, 3, 3)  # the fewest ranks and micro-batches that mistakes can tell
ONE_MICRO_BATCH = Trial({"dp": 2}, 1)


@dataclass
class Attempt:
    """A student's file, as a change of the skeleton or of the solution, and what the checker has to say about it."""

    mistake: str  # its name; "" if it is right
    says: str  # a part of what is said about it
    body: str | tuple[str, ...] = ""  # what is written where parts are missing: in all places, or in the last one
    changes: Mapping[str, str] = field(default_factory=dict)  # in the solution, if there is no `body`: old, new texts
    only: str = ""  # the function to be tried; by default, all of the exercise
    trial: Trial | None = None  # by default, the smallest one

    def text(self, exercise: Exercise, path: Path) -> str:
        text = write_out(exercise, path, solved=not self.body)
        bodies = (self.body,) if isinstance(self.body, str) else self.body
        if self.body:
            places = list(re.finditer(r"^( *)raise NotImplementedError.*\n", text, re.MULTILINE))
            for place, body in reversed(list(zip(places[-len(bodies) :], bodies, strict=True))):
                lines = "".join(f"{place[1]}{line}\n" for line in body.split("\n"))
                text = text[: place.start()] + lines + text[place.end() :]
        for old, new in self.changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


def smallest(exercise: Exercise) -> Exercise:
    """An exercise with its smallest trial of training; without, if other tests train with the library's function.

    And with one of several cases that may end in a deadlock.
    """
    trials: tuple[Trial, ...] = (TWO_REPLICAS,)
    if any("dp" not in trial.layout or len(trial.layout) > 1 for trial in exercise.trials) or not exercise.trials:
        by_ranks = sorted(exercise.trials, key=lambda trial: math.prod(trial.layout.values()))
        trials = () if exercise.functions == "schedule" else tuple(by_ranks[:1])
    return replace(exercise, trials=trials, cases=exercise.cases[: 1 if exercise.functions == "case" else None])


def judge(name: str, attempt: Attempt, folder: Path) -> None:
    """Check an attempt at an exercise, and compare what is said of it with what should be."""
    exercise = smallest(EXERCISES[name])
    if attempt.only:
        exercise = replace(exercise, cases=tuple(case for case in exercise.tried if case.endswith(attempt.only)))
    if attempt.trial is not None:
        exercise = replace(exercise, trials=(attempt.trial,))
    path = folder / exercise.file_name
    path.write_text(attempt.text(exercise, path))
    found = list(check(exercise, path, SHORT_PATIENCE if attempt.mistake == "deadlock" else PATIENCE))
    wrong = [verdict for verdict in found if not verdict.passed]
    told = [verdict.sentences for verdict in wrong]
    assert [verdict.mistake for verdict in wrong] == [attempt.mistake] * bool(attempt.mistake), told
    said = [
        sentence for verdict in wrong or found for sentence in (*verdict.sentences, *verdict.remarks, *verdict.printed)
    ]
    assert any(attempt.says in sentence for sentence in said), told or found
