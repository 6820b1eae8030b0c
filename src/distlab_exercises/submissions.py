"""The exercise that a file solves, its student, and its imports from the lab; without torch."""

import ast
import os
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distlab.run.commands import launcher
from distlab_exercises.catalogue import EXERCISES, Exercise
from distlab_exercises.skeleton import write_out
from simplellm.errors import InputError, require

OF_THE_LAB = re.compile(r"(distlab\w*|simplellm)(\.\w+)*")  # a name in one of its packages
OTHER_FILES = {".ipynb": "a notebook", ".zip": "an archive", ".pdf": "a document", ".txt": "a text", ".md": "a text"}


@dataclass(frozen=True)
class HandedIn:
    """A file in the folder of a course, and the exercise that it solves."""

    path: Path
    student: str  # the folder below that of the course; "" for a file beside these folders
    exercise: Exercise | None
    why: str = ""  # why it cannot solve any


def read(path: Path) -> str:
    """Read a file's text, in its declared encoding, without a byte-order mark; `InputError` if it is not Python."""
    require(path.is_file(), f"{path}: is not a file; give a Python file")
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); give a Python file") from error


def name_of(text: str) -> str | None:
    """Return the exercise that a file names in its docstring; None if it names none."""
    found = re.search(r"""^[rRuU]?(?:'''|\"\"\"|'|")\\?\s*Exercise ([\w-]+):""", text, re.MULTILINE)
    return found[1] if found else None


def exercise_of(path: Path, by_script: bool = True) -> Exercise:
    """Return the exercise that a file names; else the one after which its folder is named, as in my/dp-ga.

    Args:
        by_script: else take the first that is made from a script of the same name.

    Raises:
        InputError: it is none of these, or cannot be read.
    """
    if (name := name_of(read(path))) is not None:
        require(name in EXERCISES, f"{path}: {name}: no such exercise; {launcher()} exercise lists them")
        return EXERCISES[name]
    same = [each for each in EXERCISES.values() if each.file_name == path.name]
    named = [each for each in same if each.name == path.absolute().parent.name]
    if found := named or (same if by_script else []):
        return found[0]
    which = f"; give --exercise, one of {', '.join(EXERCISES)}" if by_script else "; give it with --exercise"
    raise InputError(f"{path}: does not say which exercise it solves{which}")


def shown(name: str | Path) -> str:
    """Return a name, with marks for invalid bytes, so that it can be written anywhere."""
    return os.fsencode(name).decode(errors="replace")


def handed_in(folder: Path) -> Iterator[HandedIn]:
    """Yield all files of a course, of any kind, except hidden ones and Python's caches."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_dir() or any(part.startswith(".") or part == "__pycache__" for part in parts):
            continue
        student = shown(parts[0]) if len(parts) > 1 else ""
        if path.suffix != ".py":
            kind = OTHER_FILES.get(path.suffix, "no Python file")
            yield HandedIn(path, student, None, f"{shown(path)}: is {kind}; a .py file can be checked")
            continue
        try:
            yield HandedIn(path, student, exercise_of(path, by_script=False))
        except InputError as error:
            yield HandedIn(path, student, None, shown(str(error)))


def taken_from_the_lab(exercise: Exercise, path: Path) -> list[str]:
    """Return a file's imports from the lab that are not in the file of its exercise: perhaps the solution."""
    try:
        tree = ast.parse(read(path))
    except (InputError, SyntaxError, ValueError):
        return []
    given = {"distlab", "simplellm", *_imported(ast.parse(write_out(exercise, Path(exercise.file_name))))}
    scripts = {Path(each.script).stem for each in EXERCISES.values()} - {"", "dist", path.stem}
    more = set(_imported(tree)) - given
    return sorted(name for name in more if OF_THE_LAB.fullmatch(name) or name.partition(".")[0] in scripts)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the imports of a module, as module.name; also each string that names a module of the lab, for importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and OF_THE_LAB.fullmatch(str(node.value)):
            yield str(node.value)
