"""The subcommands `exercise`, `hint` and `check`. Without torch until a file is checked."""

import argparse
import contextlib
import json
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from distlab.run.commands import LAUNCHER
from distlab_exercises.catalogue import EXERCISES, Exercise
from distlab_exercises.skeleton import name_of, write_out
from simplellm.errors import InputError, require


def exercise(args: Sequence[str], prog: str) -> int:
    """List the exercises, or write the file of one."""
    parser = _parser(prog, "Lists the exercises, or writes the file of one.")
    parser.add_argument("name", nargs="?", help="exercise to write; none lists them all")
    parser.add_argument("folder", nargs="?", type=Path, help="folder for its file, such as my/")
    given = parser.parse_args(args)
    if given.name is None:
        width = max(map(len, EXERCISES))
        print(f"{prog} NAME FOLDER   writes the file of an exercise into a folder\n")
        for each in EXERCISES.values():
            print(f"  {each.name:<{width}}  {each.minutes:>3} min  {each.title}")
        return 0
    wanted, folder = _find(given.name), given.folder
    require(folder is not None, f"exercise {given.name}: give a folder for its file, such as my/")
    path = folder / wanted.file_name
    require(not folder.exists() or folder.is_dir(), f"{folder}: is not a folder")
    if path.exists():
        held = name_of(_read(path)) or wanted.name
        what = "already exists, and may hold your work" if held == wanted.name else f"holds the exercise {held}"
        raise InputError(f"{path}: {what}; give another folder, such as {folder / wanted.name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(write_out(wanted, path))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()  # or it would be taken for someone's work
        raise InputError(f"{path}: cannot write there ({error.strerror}); give another folder") from error
    print(f"# wrote {path}: the task is at its top")
    print(f"# check it: {LAUNCHER} check {shlex.quote(str(path))}")
    print(f"# get a hint: {LAUNCHER} hint {wanted.name}")
    return 0


def hint(args: Sequence[str], prog: str) -> int:
    """Print one hint of an exercise."""
    parser = _parser(prog, "Prints a hint on an exercise, from a nudge to nearly the solution.")
    parser.add_argument("name", help="exercise")
    parser.add_argument("number", nargs="?", type=int, default=1, help="which hint (default: the first)")
    given = parser.parse_args(args)
    hints = _find(given.name).hints
    require(1 <= given.number <= len(hints), f"hint {given.number}: {given.name} has the hints 1 to {len(hints)}")
    print(textwrap.fill(f"{given.number} of {len(hints)}: {hints[given.number - 1]}", 100))
    if given.number < len(hints):
        print(f"# the next one: {prog} {given.name} {given.number + 1}")
    return 0


def check(args: Sequence[str], prog: str) -> int:
    """Check files; the exit status is 0 if all pass, 1 if one does not."""
    parser = _parser(prog, "Compares solved exercises with one process. The file runs as a program of yours.")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="file of an exercise, or folder of such files"
    )
    parser.add_argument("--exercise", help="exercise that the files solve (default: what their first lines say)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each file, and nothing else")
    given = parser.parse_args(args)
    asked = _find(given.exercise) if given.exercise else None
    files = _files(given.files, asked)
    exercises = [asked or _exercise_of(path) for path in files]
    from distlab_exercises.checker import prepare  # torch: seconds, after the arguments have been checked

    if not given.json:
        print("# trying it, in forked ranks; this takes some seconds", flush=True)
    prepare(exercises)
    results = [_check(path, wanted, given.json) for path, wanted in zip(files, exercises, strict=True)]
    if len(files) > 1 and not given.json:
        print(f"# {sum(results)} of {len(files)} files passed", flush=True)
    return 0 if all(results) else 1


def _check(path: Path, wanted: Exercise, as_json: bool) -> bool:
    from distlab.run.logs import human_bytes
    from distlab_exercises.checker import check

    started = time.monotonic()
    verdicts = []
    if not as_json:
        print(f"# {path}: {wanted.name}, {wanted.title}", flush=True)
    for verdict in check(wanted, path):
        verdicts.append(verdict)
        if as_json:
            continue
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
    passed, seconds = all(verdict.passed for verdict in verdicts), round(time.monotonic() - started, 2)
    if as_json:
        record = {"file": str(path), "exercise": wanted.name, "passed": passed, "seconds": seconds}
        print(json.dumps(record | {"trials": [verdict.to_json() for verdict in verdicts]}), flush=True)
    else:
        wrong = next((verdict for verdict in verdicts if not verdict.passed), None)
        last = "passed: it is the same training run" if wanted.trials else "passed"
        if wrong is not None:
            last = f"not yet: {wrong.sentences[0].removeprefix('not written yet: ')}"
        print(f"# {last}", flush=True)
    return passed


def _find(name: str) -> Exercise:
    require(name in EXERCISES, f"{name}: no such exercise; there are {', '.join(EXERCISES)}")
    return EXERCISES[name]


def _files(paths: Sequence[Path], wanted: Exercise | None) -> "list[Path]":
    """The files among paths; of a folder, those below it that are submissions: of `wanted`, if it is given."""
    found: list[Path] = []
    for path in paths:
        require(path.exists(), f"{path}: does not exist")
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*.py")) if _is_submission(file, wanted)]
            require(bool(inside), f"{path}: has no file of an exercise; {LAUNCHER} exercise writes them")
            found += inside
        else:
            found.append(path)
    return found


def _is_submission(path: Path, wanted: Exercise | None) -> bool:
    """Whether a file below a folder says which exercise it solves; one that only looks like it is not passed over.

    A file that does not say it is one if it has the name of `wanted`'s, the exercise that was asked for.
    """
    try:
        name = name_of(_read(path))
    except InputError as error:
        print(f"# skipped {error}", file=sys.stderr)
        return False
    if name in EXERCISES or (name is None and wanted is not None and path.name == wanted.file_name):
        return True
    if name is not None:
        print(f"# skipped {path}: {name}: no such exercise", file=sys.stderr)
    elif any(path.name == exercise.file_name for exercise in EXERCISES.values()):
        print(f"# skipped {path}: does not say which exercise it solves; give it with --exercise", file=sys.stderr)
    return False


def _read(path: Path) -> str:
    require(not path.exists() or path.is_file() or path.is_dir(), f"{path}: is no file; give a Python file")
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); give a Python file") from error


def _exercise_of(path: Path) -> Exercise:
    """The exercise that a file says it is; else the first that is made from a script of the same name."""
    if (name := name_of(_read(path))) is not None:
        require(name in EXERCISES, f"{path}: {name}: no such exercise; {LAUNCHER} exercise lists them")
        return EXERCISES[name]
    same = [each for each in EXERCISES.values() if each.file_name == path.name]
    require(
        bool(same), f"{path}: does not say which exercise it solves; give --exercise, one of {', '.join(EXERCISES)}"
    )
    return same[0]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are those of the lab."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}")


def _parser(prog: str, about: str) -> Any:
    return _Parser(prog=prog, description=about, allow_abbrev=False)
