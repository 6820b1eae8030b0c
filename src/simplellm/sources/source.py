"""The base of all sources of documents, and their errors."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

from simplellm.errors import InputError


class Source(ABC):
    """Documents in a fixed order.

    Attributes:
        advice: advice to the user if there are too few documents.
        starts_anywhere: whether `read` takes no longer for a later start.
    """

    advice = "give a longer file"
    starts_anywhere = False

    @abstractmethod
    def read(self, start: int) -> Iterator[str]:
        """Return the documents from number `start` to the last; none if `start` is beyond it."""

    def count(self) -> int:
        """Return the number of documents."""
        return sum(1 for _ in self.read(0))

    @cached_property
    def has_text(self) -> bool:
        """True if any document is not blank. Reads only up to the first such document."""
        return any(document.strip() for document in self.read(0))

    def no_text(self) -> InputError:
        """Return the error for a source without text."""
        return InputError("there is no document to read")

    def documents(self, start: int) -> Iterator[str]:
        """Yield the documents from number `start` on, endlessly: after the last comes the first.

        Raises:
            InputError: there are no documents, or all are blank.
        """
        if not self.has_text:
            raise self.no_text()
        while True:
            past_the_end = True
            for document in self.read(start):
                past_the_end = False
                yield document
            if past_the_end and not self.count():  # the file has been emptied
                raise self.no_text()
            start = start % self.count() if past_the_end else 0


def unusable(data: object, why: str) -> InputError:
    return InputError(f"data {data}: {why}", "data")


def first_line(error: Exception) -> str:
    """Return an exception as one short line."""
    first = str(error).strip().partition("\n")[0]
    return first[:150] or type(error).__name__
