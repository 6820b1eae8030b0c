"""Lessons: predict numbers, run the real commands, compare; the numbers are read from the runs' records.

A lesson is a file in `notebooks/lessons` that defines `LESSON`; `notebooks/lesson.py` is the page of each.
"""

import json
import math
import re
import runpy
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distlab.launching.command import lab_command
from distlab.run.commands import LAB, launcher
from distlab.subcommands import FUNCTIONS
from distlab_page.records import Records
from distlab_page.records import read as read_records
from distlab_playground.command import NOTEBOOKS
from simplellm.errors import InputError, require

LESSONS = NOTEBOOKS / "lessons"
SMALL = "--dmodel 32 --num-heads 2 --n-layers 4 --seq-len 32 --data sample --device cpu"  # seconds for a run


@dataclass(frozen=True)
class Outcome:
    """The result of a command."""

    output: str
    recorded: Records | None = None  # of a run; other commands leave no records

    @property
    def records(self) -> Records:
        assert self.recorded is not None, "the command is not a run"
        return self.recorded

    @property
    def loss(self) -> float:
        """The loss of the last step."""
        return float(self.records.metrics[-1]["loss"])

    @property
    def load(self) -> float:
        """The load of the fullest expert of the first layer in the last step, relative to the mean."""
        loads = self.records.metrics[-1]["expert_loads"][0]
        return max(loads) * len(loads) / sum(loads)

    def sent(self, kind: str, unit: str = "bytes") -> float:
        """Return the bytes of a kind that rank 0 sends in a step."""
        account = self.records.ledger[0]
        counts = [way[unit] for way in account["sent"] if way["kind"] == kind]
        require(bool(counts), f"{self.records.name}: rank 0 sent no {kind}")
        return sum(counts) / account["steps"]

    def messages(self, kind: str) -> float:
        """Return the messages of a kind that rank 0 sends in a step."""
        return self.sent(kind, "messages")

    def ranks_that_send(self, *kinds: str) -> int:
        """Return the number of ranks that send all of these kinds."""
        return sum({*kinds} <= {way["kind"] for way in account["sent"]} for account in self.records.ledger)

    def held(self, kind: str) -> float:
        """Return the bytes of a kind that rank 0 holds at its peak."""
        return self.records.memory[0][kind]

    def printed(self, pattern: str) -> float:
        """Return the number that the command prints: the first group of a regular expression."""
        found = re.search(pattern, self.output)
        require(found is not None, f"{pattern} is not in the output: {self.output.strip()[:200]}")
        assert found is not None
        return float(found[1])


@dataclass(frozen=True)
class Question:
    """A number to predict."""

    key: str
    asks: str
    read: Callable[[Mapping[str, Outcome]], float]  # the number, from what the lesson's commands did, by their names
    why: str  # shown with the answer
    tolerance: float = 0.02  # relative difference up to which a guess is right
    least: float = 0.0  # absolute difference that is always right

    def is_right(self, guess: float, measured: float) -> bool:
        return math.isclose(guess, measured, rel_tol=self.tolerance, abs_tol=self.least)


@dataclass(frozen=True)
class Lesson:
    """Commands of the lab by name, and questions about their outcomes."""

    name: str
    title: str
    about: str
    commands: Mapping[str, str]
    questions: tuple[Question, ...]

    def shown(self) -> list[str]:
        """Return the commands as they are typed."""
        return [f"{launcher()} {command}" for command in self.commands.values()]

    def run(self) -> dict[str, Outcome]:
        """Run all commands, and leave no files. Raises `InputError` if one fails."""
        with tempfile.TemporaryDirectory(prefix="lesson-") as folder:
            return {name: run_command(command, Path(folder) / name) for name, command in self.commands.items()}

    def measured(self, outcomes: Mapping[str, Outcome]) -> dict[str, float]:
        """Return the number that each question asks for."""
        return {question.key: float(question.read(outcomes)) for question in self.questions}


def run_command(command: str, folder: Path) -> Outcome:
    """Run a command of the lab; a run writes its records to `folder`. Raises `InputError` if it fails."""
    words = shlex.split(command)
    is_run = words[0] not in FUNCTIONS
    if (LAB / words[0]).is_file():  # commands name scripts as seen from the lab's folder
        words[0] = str(LAB / words[0])
    done = subprocess.run(
        lab_command(*words, *["--out", str(folder)] * is_run), check=False, capture_output=True, text=True
    )
    require(done.returncode == 0, f"{launcher()} {command}: failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return Outcome(done.stdout, read_records(folder) if is_run else None)


@dataclass(frozen=True)
class Answers:
    """The answers of a student to a lesson, as a file to hand in."""

    lesson: str
    student: str
    guesses: Mapping[str, float]
    measured: Mapping[str, float]
    remarks: str = ""

    def to_json(self) -> str:
        return json.dumps(vars(self), indent=1)

    @property
    def file_name(self) -> str:
        who = re.sub(r"\W+", "-", self.student).strip("-") or "nobody"
        return f"{self.lesson}-{who}.json"


def read_answers(path: Path) -> Answers:
    """Read a file of answers; `InputError` if it is none."""
    told = f"{path}: not a file of answers, as a lesson of the playground writes it"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        answers = Answers(**content)
        texts = answers.lesson, answers.student, answers.remarks
        numbers = *answers.guesses.values(), *answers.measured.values()
        is_right = (
            all(isinstance(text, str) for text in texts)
            and f"{answers.lesson}{answers.student}".isprintable()
            and all(isinstance(n, int | float) and math.isfinite(n) for n in numbers)
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{told} ({error})") from error
    except (TypeError, AttributeError, OverflowError, RecursionError) as error:  # JSON, with other keys or values
        raise InputError(told) from error
    require(is_right, told)
    return answers


def all_lessons() -> list[Lesson]:
    """Return the lessons in the order of the course."""
    return [runpy.run_path(str(file))["LESSON"] for file in sorted(LESSONS.glob("*.py"))]


def find_lesson(name: str) -> Lesson:
    """Return a lesson by its name; `InputError` if there is none."""
    known = {each.name: each for each in all_lessons()}
    require(name in known, f"{name}: no such lesson; there are {', '.join(known)}")
    return known[name]
