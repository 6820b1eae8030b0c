"""Attempts at exercises: what a student may hand in, and what the checker has to say about it."""

import re
from dataclasses import dataclass
from pathlib import Path

from distlab.exercises.catalogue import EXERCISES
from distlab.exercises.checker import check
from distlab.exercises.ranks import Patience
from distlab.exercises.skeleton import write_out
from distlab.exercises.verdict import Verdict

PATIENCE = Patience(still=2, longest=20)

AVERAGE = """for parameter in net.parameters():
    traffic.all_reduce(parameter.grad, "a gradient", kind="gradients", op=ReduceOp.SUM).wait()
    parameter.grad /= run.world_size"""
EACH = "for parameter in net.parameters():"


@dataclass
class Attempt:
    """A student's file, as a change of the skeleton or of the solution, and what the checker has to say about it."""

    exercise: str
    mistake: str  # its name; "" if it is right
    says: str  # a part of what is said about it
    body: str = ""  # what the student has written at the place of the last part that is missing
    changes: tuple[tuple[str, str], ...] = ()  # texts that are replaced; in the solution, if there is no `body`

    def text(self, path: Path) -> str:
        text = write_out(EXERCISES[self.exercise], path, solved=not self.body)
        if self.body:
            places = list(re.finditer(r"^( *)raise NotImplementedError.*\n", text, re.MULTILINE))
            lines = "".join(f"{places[-1][1]}{line}\n" for line in self.body.split("\n"))
            text = text[: places[-1].start()] + lines + text[places[-1].end() :]
        for old, new in self.changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


def verdicts(attempt: Attempt, folder: Path) -> list[Verdict]:
    path = folder / EXERCISES[attempt.exercise].file_name
    path.write_text(attempt.text(path))
    return list(check(EXERCISES[attempt.exercise], path, PATIENCE))


def judge(attempt: Attempt, tmp_path: Path) -> None:
    found = verdicts(attempt, tmp_path)
    wrong = [verdict for verdict in found if not verdict.passed]
    assert [verdict.mistake for verdict in wrong] == [attempt.mistake] * bool(attempt.mistake), [
        v.sentences for v in wrong
    ]
    assert any(attempt.says in sentence for verdict in wrong or found for sentence in verdict.sentences), wrong or found
