"""What a check says about a file."""

from dataclasses import asdict, dataclass, field
from typing import Any

from distlab_exercises.ranks import Report

Wrong = tuple[str, str] | None  # the mistake's name, and a sentence


@dataclass
class Verdict:
    """The result of one trial of an exercise."""

    trial: str
    passed: bool = False
    mistake: str = ""  # its name, for machines
    sentences: list[str] = field(default_factory=list)  # what is wrong, or what was found right
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)  # bytes in a step over a network, and those needed
    remarks: list[str] = field(default_factory=list)  # what a right solution could do better
    printed: list[str] = field(default_factory=list)  # by the student's own lines, where the trial fails
    seconds: float = 0.0

    def passes(self, sentence: str) -> "Verdict":
        self.passed, self.sentences = True, [sentence]
        return self

    def fails(self, mistake: str, sentences: list[str], printed: list[Report] | None = None) -> "Verdict":
        self.passed, self.mistake, self.sentences = False, mistake, sentences
        for report in printed or []:
            self.printed += [f"rank {report.rank}: {line}" for line in report.printed[-5:]]
        return self

    def judged(self, wrong: Wrong, right: str) -> "Verdict":
        return self.passes(right) if wrong is None else self.fails(wrong[0], [wrong[1]])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
