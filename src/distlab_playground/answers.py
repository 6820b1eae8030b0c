"""Check the answers that a class has handed in: files that the lessons of the playground write.

./launch.sh answers submissions

Each lesson's commands run once here. A guess is right within the tolerance of its question; a number that a student
measured must be the number measured here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from distlab_playground.lessons import Answers, Lesson, find_lesson, read_answers
from simplellm import command_line
from simplellm.errors import InputError, require


@dataclass
class Request:
    """The answers to check."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """folder with the files, at any depth"""


def check(request: Request) -> int:
    """Print a line for each student and question, and what cannot be checked; return 1 if there is any, else 0."""
    require(request.folder.is_dir(), f"{request.folder}: is not a folder; give the one with the answers")
    handed_in, unchecked = list[Answers](), list[str]()
    for path in sorted(request.folder.rglob("*.json")):
        try:
            handed_in.append(read_answers(path))
        except InputError as error:
            unchecked.append(str(error))
    require(bool(handed_in or unchecked), f"{request.folder}: has no file of answers, such as replicas-ada.json")
    if not handed_in and len(unchecked) > 1:  # of another kind, such as the records of a run
        others = f"none of its {len(unchecked)} JSON files is a file of answers, such as replicas-ada.json"
        raise InputError(f"{request.folder}: {others}; the first: {unchecked[0]}")
    print(f"{'lesson':<14} {'student':<16} {'question':<14} {'guess':>12} {'measured':>12}  verdict")
    for name in sorted({one.lesson for one in handed_in}):
        try:
            lesson = find_lesson(name)
            here = lesson.measured(lesson.run())
        except InputError as error:
            unchecked.append(str(error))
            continue
        for one in handed_in:
            if one.lesson == name:
                for line in verdicts(lesson, one, here):
                    print(line, flush=True)
    for sentence in unchecked:
        print(f"# {sentence}")
    return 1 if unchecked else 0


def verdicts(lesson: Lesson, answers: Answers, here: dict[str, float]) -> Iterable[str]:
    """Yield a line for each question of a lesson, from the numbers measured here."""
    for question in lesson.questions:
        key, expected = question.key, here[question.key]
        guess, measured = answers.guesses.get(key), answers.measured.get(key)
        if guess is None:
            verdict = "not answered"
        elif measured is None:
            verdict = "not measured"
        elif not question.is_right(measured, expected):
            verdict = f"measured something else; here it is {expected:g}"
        else:
            verdict = "right" if question.is_right(guess, expected) else "off"
        shown = ("-" if number is None else f"{number:,.6g}" for number in (guess, measured))
        columns = " ".join(f"{number:>12}" for number in shown)
        yield f"{lesson.name:<14} {answers.student:<16} {key:<14} {columns}  {verdict}"


command = command_line.as_command(check, Request, __doc__)

if __name__ == "__main__":
    command_line.run(check, Request, __doc__)
