"""A file of documents: its format from its name, and its two splits."""

import os
from collections.abc import Iterator
from pathlib import Path

from simplellm.errors import InputError
from simplellm.sources.source import Source, unusable


def open_file(data: str, wanted: str = "give a .txt, .jsonl or .parquet file") -> Source:
    """Return all documents of a file.

    Args:
        data: path of the file.
        wanted: the advice in error messages.

    Raises:
        InputError: it cannot be read.
    """
    path = Path(os.path.expanduser(data))
    if os.path.isdir(path):
        raise unusable(data, f"is a folder; {wanted}")
    if not os.path.exists(path):
        raise unusable(data, f"there is no such file; {wanted}")
    if not os.path.isfile(path):  # a pipe can be read only once, and a device may never end
        raise unusable(data, f"is a pipe or a device; {wanted}")
    ending = path.suffix.lower()
    if ending in (".txt", ".jsonl"):
        from simplellm.sources.text import JsonLines, Text

        return Text(path) if ending == ".txt" else JsonLines(path)
    if ending == ".parquet":
        from simplellm.sources.parquet import Parquet

        return Parquet([path])
    raise unusable(data, f"its name does not tell its format; {wanted}")


def open_split(data: str, split: str) -> Source:
    """Return the documents of a split of a file; `InputError` if it cannot be read."""
    wanted = "give sample, tinystories, or the path of a .txt, .jsonl or .parquet file"
    return FileSplit(open_file(data, wanted), Path(os.path.expanduser(data)), split)


class FileSplit(Source):
    """One split of a file's documents: every 20th is for validation, the others are for training."""

    def __init__(self, file: Source, path: Path, split: str) -> None:
        self._file = file
        self._path = path
        self._split = split
        self._validates = split == "validation"

    def read(self, start: int) -> Iterator[str]:
        first = 20 * start + 19 if self._validates else start + start // 19
        for index, document in enumerate(self._file.read(first), first):
            if (index % 20 == 19) == self._validates:
                yield document

    def count(self) -> int:
        total = self._file.count()
        return total // 20 if self._validates else total - total // 20

    def no_text(self) -> InputError:
        total = self._file.count()
        if not total:
            return unusable(self._path, "the file holds no document; give one with text in it")
        if self.count():
            return unusable(self._path, f"every {self._split} document is blank; give a file with text in it")
        why = f"validation takes every 20th document and there are only {total}"
        return unusable(self._path, f"{why}; {self._file.advice}")
