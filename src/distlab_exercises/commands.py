"""The subcommands `exercise`, `hint`, `check` and `grade`. They need no torch until a file is checked."""

import argparse
import contextlib
import itertools
import json
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from distlab.run.commands import launcher
from distlab_exercises.catalogue import EXERCISES, Exercise
from distlab_exercises.skeleton import write_out
from distlab_exercises.submissions import exercise_of, handed_in, name_of, read, shown, taken_from_the_lab
from distlab_exercises.verdict import Verdict
from simplellm.errors import InputError, require

MY = Path("my")  # which git ignores


def exercise(args: Sequence[str], prog: str) -> int:
    """List the exercises, or write the file of one."""
    parser = parser_of(prog, "Lists the exercises, or writes the file of one.")
    parser.add_argument("name", nargs="?", help="exercise to write; none lists them all")
    parser.add_argument("folder", nargs="?", type=Path, help="folder for its file (default: my/NAME)")
    given = parser.parse_args(args)
    if given.name is None:
        _list_by_chapter(prog)
        return 0
    wanted = _find(given.name)
    folder: Path = given.folder or MY / wanted.name
    path = folder / wanted.file_name
    is_folder = folder.is_dir() or not (folder.exists() or folder.suffix == ".py")
    require(is_folder, f"{folder}: is not a folder; give one, the file in it will be {wanted.file_name}")
    if path.exists():
        raise InputError(_why_not_written(wanted, path))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(write_out(wanted, path), encoding="utf-8", errors="replace")
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()  # or it would be mistaken for someone's work
        raise InputError(f"{path}: cannot write there ({error.strerror}); give another folder") from error
    print(f"# wrote {path}: the task is at its top")
    print(f"# check it: {launcher()} check {shlex.quote(str(path))}")
    print(f"# get a hint: {launcher()} hint {wanted.name}")
    return 0


def _why_not_written(wanted: Exercise, path: Path) -> str:
    """Return why an exercise is not written over a file, and a folder that is free."""
    held = name_of(read(path)) or wanted.name
    if held != wanted.name:
        return f"{path}: holds the exercise {held}; give another folder, such as {path.parent / wanted.name}"
    beside = (path.parent.parent / f"{wanted.name}-{number}" for number in itertools.count(2))
    free = next(folder for folder in beside if not folder.exists())
    return f"{path}: already exists, and may hold your work; give another folder, such as {free}"


def _list_by_chapter(prog: str) -> None:
    width = max(map(len, EXERCISES))
    print(f"{prog} NAME [FOLDER]   writes the file of an exercise into a folder, by default {MY}/NAME")
    by_number = sorted(EXERCISES.values(), key=lambda each: int(each.chapter.rpartition(" ")[2]))
    for chapter, exercises in itertools.groupby(by_number, key=lambda each: each.chapter):
        page, _, number = chapter.partition(", ")
        print(f"\n{number}: {page}")
        for each in exercises:
            print(f"  {each.name:<{width}}  {each.minutes:>3} min  {each.title}")


def hint(args: Sequence[str], prog: str) -> int:
    """Print one hint of an exercise."""
    parser = parser_of(prog, "Prints a hint on an exercise, from a nudge to nearly the solution.")
    parser.add_argument("name", help="exercise")
    parser.add_argument("number", nargs="?", type=int, default=1, help="which hint (default: the first)")
    given = parser.parse_args(args)
    hints = _find(given.name).hints
    require(1 <= given.number <= len(hints), f"hint {given.number}: {given.name} has the hints 1 to {len(hints)}")
    shown = f"{given.number} of {len(hints)}: {hints[given.number - 1]}"
    print(textwrap.fill(shown, 100, break_on_hyphens=False))
    if given.number < len(hints):
        print(f"# the next one: {prog} {given.name} {given.number + 1}")
    return 0


def check(args: Sequence[str], prog: str) -> int:
    """Check files; the exit status is 0 if all pass, 1 if one does not."""
    parser = parser_of(prog, "Compares solved exercises with one process. The file runs as a program of yours.")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="file of an exercise, or folder of such files"
    )
    parser.add_argument("--exercise", help="exercise that the files solve (default: what their first lines say)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each file, and nothing else")
    given = parser.parse_args(args)
    asked = _find(given.exercise) if given.exercise else None
    files = _files(given.files, asked)
    exercises = [asked or exercise_of(path) for path in files]
    from distlab_exercises.checker import prepare  # torch: seconds, after the arguments have been checked

    if not given.json:
        print("# trying it; this takes some seconds", flush=True)
    prepare(exercises)
    results = [_check(path, wanted, given.json) for path, wanted in zip(files, exercises, strict=True)]
    if len(files) > 1 and not given.json:
        print(f"# {sum(results)} of {len(files)} files passed", flush=True)
    return 0 if all(results) else 1


def _check(path: Path, wanted: Exercise, as_json: bool) -> bool:
    from distlab_exercises.checker import check

    started = time.monotonic()
    verdicts = []
    if not as_json:
        print(f"# {path}: {wanted.name}, {wanted.title}", flush=True)
    for verdict in check(wanted, path):
        verdicts.append(verdict)
        if not as_json:
            show(verdict)
    passed, seconds = all(verdict.passed for verdict in verdicts), round(time.monotonic() - started, 2)
    imports = taken_from_the_lab(wanted, path)
    if as_json:
        record = {"file": str(path), "exercise": wanted.name, "passed": passed, "seconds": seconds, "imports": imports}
        print(json.dumps(record | {"trials": [*map(asdict, verdicts)]}), flush=True)
    else:
        wrong = next((verdict for verdict in verdicts if not verdict.passed), None)
        last = "passed: it is the same training run" if wanted.trials else "passed"
        if wrong is not None:
            last = f"not yet: {wrong.sentences[0].removeprefix('not written yet: ')}"
        if imports:
            print(f"# it imports of the lab, beyond what its exercise gives: {', '.join(imports)}")
        print(f"# {last}", flush=True)
    return passed


def show(verdict: Verdict) -> None:
    """Print the result of a trial."""
    from distlab.run.logs import human_bytes

    print(f"{'right' if verdict.passed else 'WRONG'}  {verdict.trial}  ({verdict.seconds:.1f} s)")
    for sentence in verdict.sentences:
        print(textwrap.indent(sentence, "       "))
    for what, (sent, needed) in verdict.sent.items():
        bytes_of_all = f"{human_bytes(sent)} in a step over a network, of all ranks"
        print(f"       {what}: {bytes_of_all}; {human_bytes(needed)} are needed")
    for remark in verdict.remarks:
        print(f"       remark: {remark}")
    for line in verdict.printed:
        print(f"       | {line}")


def grade(args: Sequence[str], prog: str) -> int:
    """Grade a course; the exit status is 0 if every student has passed every exercise."""
    about = "Grades the exercises in a folder that has a folder for each student. The files run as programs of yours."
    parser = parser_of(prog, about)
    parser.add_argument("folder", type=Path, help="folder of the course, with a folder for each student")
    parser.add_argument("--exercise", action="append", help="exercise of the course (default: all that are found)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the grades as a table for a spreadsheet, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was found as one JSON object, too")
    parser.add_argument("--at-once", type=int, help="files checked at a time (default: the cores)")
    given = parser.parse_args(args)
    require(given.folder.is_dir(), f"{given.folder}: is not a folder; give that of the course")
    require(given.at_once is None or given.at_once >= 1, f"--at-once {given.at_once}: give at least 1")
    files = list(handed_in(given.folder))
    students = sorted(shown(path.name) for path in given.folder.iterdir() if path.is_dir() and path.name[0] not in "._")
    found = {file.exercise.name for file in files if file.exercise is not None}
    asked = {_find(name).name for name in given.exercise} if given.exercise else found
    exercises = [each for each in EXERCISES.values() if each.name in asked]
    what = " or ".join(sorted(asked)) or "an exercise"
    require(bool(asked & found or (asked and students)), no_exercise(given.folder, what))
    with contextlib.ExitStack() as stack:
        for path in (path for path in (given.csv, given.json) if path is not None):
            try:
                path.touch(exist_ok=False)
            except OSError as error:
                raise InputError(f"{path}: cannot be written ({error.strerror}); give another file") from error
            stack.callback(_remove_empty, path)
        from distlab.machine.devices import cores  # torch: seconds, after the arguments have been checked
        from distlab_exercises.grading import grade_course

        at_once = given.at_once or cores()
        return 0 if grade_course(files, students, exercises, at_once, given.csv, given.json) else 1


def _remove_empty(path: Path) -> None:
    """Remove a file to which nothing was written, so that the same command can be given again."""
    if not path.stat().st_size:
        path.unlink()


def no_exercise(path: Path, what: str = "an exercise") -> str:
    return f"{path}: has no file of {what}; {launcher()} exercise writes them"


def _find(name: str) -> Exercise:
    require(name in EXERCISES, f"{name}: no such exercise; there are {', '.join(EXERCISES)}")
    return EXERCISES[name]


def _files(paths: Sequence[Path], wanted: Exercise | None) -> list[Path]:
    """Return the files among paths, and the files below folders that solve an exercise or have the name of `wanted`."""
    found: list[Path] = []
    for path in paths:
        require(path.exists(), f"{path}: there is no such file; {launcher()} exercise NAME writes one")
        inside = [] if path.is_dir() else [path]
        for file in (file for file in handed_in(path) if file.path.suffix == ".py"):
            if file.exercise is not None or (wanted is not None and file.path.name == wanted.file_name):
                inside.append(file.path)
            else:
                print(f"# skipped {file.why}", file=sys.stderr)
        require(bool(inside), no_exercise(path))
        found += inside
    return found


class _Parser(argparse.ArgumentParser):
    """A parser that raises the lab's errors."""

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file, flush=True)  # argparse's own ignores a failure to write

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}")


def parser_of(prog: str, about: str) -> Any:
    """Return a parser of a subcommand's arguments, which raises the lab's errors."""
    return _Parser(prog=prog, description=about, allow_abbrev=False)
