"""The base of all sources of documents, and their errors."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

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

    def check_text(self) -> None:
        """Raise `InputError` if there are no documents, or all are blank. Reads up to the first that is not."""
        if not any(document.strip() for document in self.read(0)):
            raise self.no_text()

    def no_text(self) -> InputError:
        """Return the error for a source without text."""
        return InputError("there is no document to read")


def unusable(data: object, why: str) -> InputError:
    return InputError(f"data {data}: {why}", "data")


def first_line(error: Exception) -> str:
    """Return an exception as one short line."""
    first = str(error).strip().partition("\n")[0]
    return first[:150] or type(error).__name__
