"""The result of a check of a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class Wrong(Exception):
    """A solution is wrong: the mistake's name, for machines, and sentences that explain it."""

    def __init__(self, mistake: str, *sentences: str) -> None:
        super().__init__(sentences[0])
        self.mistake, self.sentences = mistake, sentences


def expect(is_right: object, mistake: str, *sentences: str) -> None:
    """Raise `Wrong` unless something is right."""
    if not is_right:
        raise Wrong(mistake, *sentences)


@contextmanager
def where(place: str) -> Iterator[None]:
    """Begin the sentence about a mistake inside with the place."""
    try:
        yield
    except Wrong as wrong:
        first, *others = wrong.sentences
        raise Wrong(wrong.mistake, f"{place}: {first}", *others) from wrong


@dataclass
class Verdict:
    """The result of one trial of an exercise."""

    trial: str
    passed: bool = False
    mistake: str = ""  # its name, for machines
    sentences: list[str] = field(default_factory=list)  # the mistakes, or the correct results
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)  # bytes in a step over a network, and those needed
    remarks: list[str] = field(default_factory=list)  # improvements to a right solution
    printed: list[str] = field(default_factory=list)  # by the student's own lines, where the trial fails
    seconds: float = 0.0
