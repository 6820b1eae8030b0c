"""Text files: documents between separators (.txt), or one a line (.jsonl)."""

import codecs
import contextlib
import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from simplellm.sources.source import Source, unusable


class Text(Source):
    """A .txt file: documents between "<|endoftext|>", or between blank lines.

    The marker separates if a line begins or ends with it. A file with neither is one document, even if it has a story
    on each line.
    """

    MARKER = b"<|endoftext|>"
    advice = 'give a longer file, or put a blank line (or "<|endoftext|>") between its documents'

    def __init__(self, path: Path) -> None:
        _check_text(path)
        self._path = path
        lines = (line.strip() for line in _lines(path) if self.MARKER in line)
        self._is_marked = any(line.startswith(self.MARKER) or line.endswith(self.MARKER) for line in lines)

    def read(self, start: int) -> Iterator[str]:
        for lines in islice(self._blocks(), start, None):
            yield b"".join(lines).decode().replace("\r\n", "\n").strip()

    def _blocks(self) -> Iterator[list[bytes]]:
        """Yield the lines of each document that is not blank."""
        block: list[bytes] = []
        for part in chain(self._parts(), [None]):
            if part is not None:
                block.append(part)
                continue
            if any(line.strip() for line in block):
                yield block
            block = []

    def _parts(self) -> Iterator[bytes | None]:
        """Yield lines, or parts of them, and None where a document ends."""
        for line in _lines(self._path):
            if not self._is_marked:
                yield line if line.strip() else None
                continue
            first, *others = line.split(self.MARKER)
            yield first
            for part in others:
                yield None
                yield part


class JsonLines(Source):
    """A .jsonl file: each line is an object whose field "text" is a document. Blank lines are ignored."""

    def __init__(self, path: Path) -> None:
        _check_text(path)
        self._path = path

    def read(self, start: int) -> Iterator[str]:
        lines = ((number, line) for number, line in enumerate(_lines(self._path), 1) if not line.isspace())
        for line_number, line in islice(lines, start, None):
            yield self._document(line, line_number)

    def _document(self, line: bytes, line_number: int) -> str:
        try:
            text = json.loads(line)["text"]
            text.encode()  # fails for half of a surrogate pair, which JSON allows but which is not text
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise unusable(
                self._path,
                f'line {line_number} is not a JSON object with a string "text"; '
                'every line is to be like {"text": "Once upon a time, ..."}',
            ) from None
        return str(text)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise unusable(path, f"cannot be read ({error.strerror}); give a file that can") from None


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, without the byte-order mark at its beginning, if there is one."""
    with _opened(path) as file:
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        yield from file


def _check_text(path: Path) -> None:
    """Raise `InputError` unless the whole file is UTF-8 text; checked now, not when training reaches the error."""
    lines = offset = 0  # before the current block, which ends at the end of a line
    with _opened(path) as file:
        while block := file.read(2**20) + file.readline():
            try:
                block.decode()
                place, problem = block.find(0), "has a NUL, as in UTF-16 or binary data; give a file in UTF-8"
            except UnicodeDecodeError as error:
                place, problem = error.start, "is not UTF-8; give a file in UTF-8"
            if place >= 0:
                line = lines + block.count(b"\n", 0, place) + 1
                raise unusable(path, f"line {line} (byte {offset + place}) {problem}")
            lines += block.count(b"\n")
            offset += len(block)
