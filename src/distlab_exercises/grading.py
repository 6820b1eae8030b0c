"""Grades a course: every file of every student in a separate process, several at a time, and none is lost."""

import csv
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from distlab.run.terminal import counted
from distlab_exercises.catalogue import Exercise
from distlab_exercises.checker import check, prepare
from distlab_exercises.forked import forked, leaving_no_process
from distlab_exercises.submissions import HandedIn, shown, taken_from_the_lab
from distlab_exercises.training import expected_of

SECONDS_OF_A_TRIAL = 30.0  # maximum for each trial of a file
SECONDS_BETWEEN_LINES = 10.0  # that show the progress
PASSED, WRONG, MISSING = "passed", "wrong", "missing"


@dataclass
class Grade:
    """A student's solution of an exercise, and its verdict."""

    student: str
    exercise: str
    result: str  # "passed", "wrong", "missing"
    mistake: str = ""  # its name, such as "divided-twice"
    sentence: str = ""  # what is wrong
    file: str = ""
    imports: list[str] = field(default_factory=list)  # its imports from the lab that are not in the exercise's file
    seconds: float = 0.0


def grade_course(
    files: Sequence[HandedIn],
    students: Sequence[str],
    exercises: Sequence[Exercise],
    at_once: int,
    csv_file: Path | None,
    json_file: Path | None,
) -> bool:
    """Grade all files, and print a row for each student and exercise, and the misconceptions of the class.

    Args:
        students: all students of the course, also those who have handed in nothing.
        at_once: number of files checked at the same time.
        csv_file: additional output of the rows.
        json_file: additional output of everything that is printed.

    Returns:
        Whether every student has passed every exercise.
    """
    rest = [file.why or f"{shown(file.path)}: is not asked for" for file in files if file.exercise not in exercises]
    print(f"# trying {counted(len(files) - len(rest), 'files')}, {at_once} at a time", flush=True)
    grades, told = [], time.monotonic()
    for one in _grade(files, students, exercises, at_once):
        grades.append(one)
        if time.monotonic() - told > SECONDS_BETWEEN_LINES:
            print(f"# {len(grades)} of {len(files) - len(rest)}", flush=True)
            told = time.monotonic()
    order = [each.name for each in exercises]
    grades.sort(key=lambda each: (each.student, order.index(each.exercise), each.file))
    mistakes = _misconceptions(grades)
    wide, name = max(len(each.student) for each in grades), max(map(len, order))
    for each in grades:
        what = f"{each.result if each.result != WRONG else 'WRONG':<8} {each.mistake}"
        imports = f"   imports {', '.join(each.imports)}" if each.imports else ""
        print(f"{each.student:<{wide}}  {each.exercise:<{name}}  {what}{imports}".rstrip())
    for sentence in rest:
        print(f"# not graded: {sentence}")
    for mistake in mistakes:
        tried = counted(mistake["of"], "files")
        print("# {files} of {tried} of {exercise}: {mistake}: {for_example}".format(tried=tried, **mistake))
    passed = sum(each.result == PASSED for each in grades)
    print(f"# {passed} of {len(grades)} passed", flush=True)
    if csv_file is not None:
        _write_csv(grades, csv_file)
    if json_file is not None:
        found = {"grades": [asdict(each) for each in grades], "not_graded": rest, "misconceptions": mistakes}
        json_file.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return passed == len(grades)


def _grade(
    files: Sequence[HandedIn], students: Sequence[str], exercises: Sequence[Exercise], at_once: int
) -> Iterator[Grade]:
    """Yield the grades of files, in the order in which their checks end; then the missing ones."""
    prepare(exercises)
    for trial in (trial for exercise in exercises for trial in exercise.trials):
        expected_of(trial)  # or each fork would compute it again
    known = [(file, exercise) for file in files for exercise in exercises if file.exercise is exercise]
    with leaving_no_process():
        yield from _grade_several(known, at_once)
    for student in students:
        held = [file.exercise for file in files if file.student == student]
        for exercise in (exercise for exercise in exercises if exercise not in held):
            yield Grade(student, exercise.name, MISSING)


def _grade_several(left: list[tuple[HandedIn, Exercise]], at_once: int) -> Iterator[Grade]:
    running: dict[Connection, tuple[Grade, float, ExitStack]] = {}
    try:
        while left or running:
            while left and len(running) < at_once:
                (file, exercise), *left = left
                stack = ExitStack()
                [pipe] = stack.enter_context(forked(1, partial(_grade_one, file, exercise)))
                imports = taken_from_the_lab(exercise, file.path)
                seconds = SECONDS_OF_A_TRIAL * (len(exercise.tried) + len(exercise.trials))
                began = Grade(file.student, exercise.name, WRONG, file=shown(file.path), imports=imports)
                running[pipe] = began, time.monotonic() + seconds, stack
            wait(list(running), timeout=0.5)
            for pipe, (began, deadline, stack) in list(running.items()):
                if pipe.poll() or time.monotonic() > deadline:
                    yield _answer(pipe, began)
                    stack.close()
                    del running[pipe]
    finally:
        for _, _, stack in running.values():
            stack.close()


def _grade_one(file: HandedIn, exercise: Exercise, _: int, pipe: Connection) -> None:
    started = time.monotonic()
    verdicts = list(check(exercise, file.path))
    wrong = next((verdict for verdict in verdicts if not verdict.passed), None)
    answer: dict[str, Any] = {"result": PASSED if wrong is None else WRONG}
    if wrong is not None:
        answer |= {"mistake": wrong.mistake, "sentence": wrong.sentences[0]}
    pipe.send_bytes(json.dumps(answer | {"seconds": round(time.monotonic() - started, 2)}).encode())


def _answer(pipe: Connection, began: Grade) -> Grade:
    if not pipe.poll():
        began.mistake, began.sentence = "no-end", "the check did not come to an end, and was stopped"
        return began
    try:
        return Grade(**asdict(began) | json.loads(pipe.recv_bytes()))
    except EOFError:
        began.mistake, began.sentence = "no-answer", "the check itself failed; try it alone"
        return began


def _write_csv(grades: Sequence[Grade], path: Path) -> None:
    """Write a table for a spreadsheet, a row for each grade."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Grade)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(each) | {"imports": " ".join(each.imports)} for each in grades)


def _misconceptions(grades: Sequence[Grade]) -> list[dict[str, Any]]:
    """Return the class's mistakes, the most frequent first, each with one of its sentences."""
    counts = Counter((each.exercise, each.mistake) for each in grades if each.result == WRONG)
    files = Counter(each.exercise for each in grades if each.result != MISSING)
    said = {(each.exercise, each.mistake): each.sentence for each in reversed(grades)}
    return [
        {"exercise": name, "mistake": mistake, "files": count, "of": files[name], "for_example": said[name, mistake]}
        for (name, mistake), count in counts.most_common()
    ]
