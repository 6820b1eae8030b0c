"""Sources of documents: the generator, the hub's TinyStories, or a file; each has a fixed order and two splits."""

import codecs
import errno
import json
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, BinaryIO

from simplellm.errors import InputError, require_package
from simplellm.stories import story

HUB_REPOSITORY = "roneneldan/TinyStories"  # or a folder with the same files
SPLITS = ("train", "validation")


def choose_source(data: str) -> tuple[str, str]:
    """Return the source that `data` stands for, and a phrase about it.

    Args:
        data: as for `TinyStories`.

    Returns:
        "sample", "tinystories" or a path, never "auto"; and a phrase for the log that names the source and, for "auto",
        the reason for it.
        "auto" is the hub's TinyStories if it is cached or can be reached, else the generator; without a network, this
        function takes at most 2 seconds.
    """
    if data == "sample":
        return data, "the generator"
    if data == "tinystories":
        return data, "the hub's TinyStories"
    if data != "auto":
        return data, data
    if find_spec("datasets") is None:
        return "sample", "the generator: the hub's TinyStories needs datasets, which is not installed"
    try:
        if cached_files("train"):
            return "tinystories", "the hub's TinyStories: it is in the local cache"
    except OSError as error:
        why = f"{error.strerror}: {error.filename}" if error.filename else _line(error)
        return "sample", f"the generator: the hub's TinyStories in the local cache cannot be read ({why})"
    problem = hub_problem()
    if problem is None:
        return "tinystories", "the hub's TinyStories: the hub answers"
    return "sample", f"the generator: the hub's TinyStories cannot be reached ({problem})"


class Source(ABC):
    """Documents in a fixed order.

    Attributes:
        advice: advice to the user if there are too few documents.
    """

    advice = "give a longer file"

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


def open_source(data: str, split: str, seed: int, revision: str | None = None) -> Source:
    """Return the documents of a split, from a source that `choose_source` returned.

    Args:
        revision: revision of the hub's data set; by default the newest in the local cache, if any, else the newest.

    Raises:
        InputError: `data` cannot be read.
    """
    if data == "sample":
        return Generator(split, seed)
    if data == "tinystories":
        require_package("datasets", "data tinystories", "data")
        try:
            files = cached_files(split, revision)
        except OSError as error:
            raise _unusable("tinystories", f"the hub's local cache cannot be read ({error}); give sample") from None
        return Parquet(files) if files else Hub(split, revision)
    wanted = "give sample, tinystories, or the path of a .txt, .jsonl or .parquet file"
    return Part(open_file(data, wanted), Path(os.path.expanduser(data)), split)


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
        raise _unusable(data, f"is a folder; {wanted}")
    if not os.path.exists(path):
        raise _unusable(data, f"there is no such file; {wanted}")
    if not os.path.isfile(path):  # a pipe can be read only once, and a device may never end
        raise _unusable(data, f"is a pipe or a device; {wanted}")
    ending = path.suffix.lower()
    if ending == ".txt":
        return Text(path)
    if ending == ".jsonl":
        return JsonLines(path)
    if ending == ".parquet":
        return Parquet([path])
    raise _unusable(data, f"its name does not tell its format; {wanted}")


class Generator(Source):
    """The generated stories (see `simplellm.stories`)."""

    def __init__(self, split: str, seed: int) -> None:
        self._split = split
        self._seed = seed

    def read(self, start: int) -> Iterator[str]:
        return (story(index, self._seed, self._split) for index in count(start))


class Part(Source):
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
            return _unusable(self._path, "the file holds no document; give one with text in it")
        if self.count():
            return _unusable(self._path, f"every {self._split} document is blank; give a file with text in it")
        why = f"validation takes every 20th document and there are only {total}"
        return _unusable(self._path, f"{why}; {self._file.advice}")


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
            raise _unusable(
                self._path,
                f'line {line_number} is no JSON object with a string "text"; '
                'every line is to be like {"text": "Once upon a time, ..."}',
            ) from None
        return str(text)


class Parquet(Source):
    """Parquet files, one after another, whose column "text" contains the documents."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def read(self, start: int) -> Iterator[str]:
        for path in self._paths:
            with _parquet(path) as file:
                for group in range(file.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    if start >= rows:  # skip the group without reading it
                        start -= rows
                        continue
                    for batch in file.iter_batches(row_groups=[group], columns=["text"], batch_size=256):
                        for text in batch.column(0)[start:].to_pylist():
                            if not isinstance(text, str):
                                raise _unusable(path, f'the column "text" holds {text!r:.50}; it is to hold text')
                            yield text
                        start = max(0, start - batch.num_rows)

    def count(self) -> int:
        total = 0
        for path in self._paths:
            with _parquet(path) as file:
                total += file.metadata.num_rows
        return total


class Hub(Source):
    """The hub's TinyStories (Eldan and Li, arXiv 2305.07759), streamed over the network."""

    def __init__(self, split: str, revision: str | None = None) -> None:
        if not os.path.isdir(HUB_REPOSITORY) and (problem := hub_problem()):
            missing = "nothing is cached" if revision is None else f"its revision {revision} is not cached"
            raise self._unreadable(f"the hub cannot be reached and {missing}: {problem}")
        from datasets import load_dataset  # imported here because it takes seconds

        try:
            self._rows = load_dataset(HUB_REPOSITORY, split=split, streaming=True, revision=revision)
        except Exception as error:  # of many kinds, from several libraries
            raise self._unreadable(_line(error)) from error

    def read(self, start: int) -> Iterator[str]:
        try:
            for row in self._rows.skip(start) if start else self._rows:
                yield row["text"]
        except Exception as error:
            raise self._unreadable(_line(error)) from error

    def no_text(self) -> InputError:
        return self._unreadable("it holds no document")

    def _unreadable(self, why: str) -> InputError:
        advice = "give sample, or the path of a .txt, .jsonl or .parquet file"
        return _unusable("tinystories", f"{HUB_REPOSITORY} cannot be read ({why}); {advice}")


def cached_files(split: str, revision: str | None = None) -> list[Path]:
    """Return the Parquet files of the hub's TinyStories in the local cache, in order; [] if they are not all there.

    Args:
        split: "train" or "validation".
        revision: revision of the data set; by default the one that was cached last.

    Raises:
        OSError: the cache or one of the files cannot be read, or a file is not a complete Parquet file.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    snapshots = Path(HF_HUB_CACHE, "datasets--" + HUB_REPOSITORY.replace("/", "--"), "snapshots")
    try:
        names = os.listdir(snapshots)
    except FileNotFoundError:
        return []
    found = (snapshots / name for name in names if revision in (None, name))
    for snapshot in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        files = sorted(snapshot.rglob(f"{split}-*-of-*.parquet"))  # train-00000-of-00004-2d5a1467fff1081b.parquet
        if files and len(files) == int(files[0].name.split("-of-")[1][:5]):
            for file in files:
                _check_ends(file)
            return files
    return []


def _check_ends(path: Path) -> None:
    """Raise `OSError` unless a file can be read and begins and ends as a Parquet file does."""
    mark = b"PAR1"
    with path.open("rb") as file:
        beginning = file.read(len(mark))
        file.seek(-min(len(mark), file.seek(0, os.SEEK_END)), os.SEEK_END)
        if beginning != mark or file.read() != mark:
            raise OSError(errno.EINVAL, "not a complete Parquet file", str(path))


def hub_revision() -> str | None:
    """Return the revision of the hub's TinyStories that `open_source` would read now; None if it cannot be known."""
    try:
        files = cached_files("train")
    except OSError:  # `open_source` reports it
        return None
    if files:
        return next(path.name for path in files[0].parents if path.parent.name == "snapshots")
    return _ask_hub(2.0)[1] if not os.path.isdir(HUB_REPOSITORY) else None


def hub_problem(seconds: float = 2.0) -> str | None:
    """Return why the hub's TinyStories cannot be reached; None if it can. Takes at most `seconds`."""
    return _ask_hub(seconds)[0]


def _ask_hub(seconds: float) -> tuple[str | None, str | None]:
    """Return why the hub cannot be reached, and its newest revision of TinyStories; one of them is None."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set", None
    answer: queue.SimpleQueue[tuple[str | None, str | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            from huggingface_hub import HfApi

            answer.put((None, HfApi().dataset_info(HUB_REPOSITORY, timeout=seconds).sha))
        except Exception as error:
            answer.put((_line(error), None))

    # In a separate thread, because the timeout does not cover everything: a host name look-up can take a minute.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.get(timeout=seconds)
    except queue.Empty:
        return f"no answer within {seconds:g} seconds", None


def _unusable(data: object, why: str) -> InputError:
    return InputError(f"data {data}: {why}", "data")


def _line(error: Exception) -> str:
    """Return an exception as one short line."""
    first = str(error).strip().partition("\n")[0]
    return first[:150] or type(error).__name__


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror}); give a file that can") from None


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
                raise _unusable(path, f"line {line} (byte {offset + place}) {problem}")
            lines += block.count(b"\n")
            offset += len(block)


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Yield a Parquet file with a column "text"; errors when it is opened or read become an InputError."""
    require_package("pyarrow", f"data {path}", "data")
    from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]  # here, because it takes 0.2 s

    wanted = 'give a .parquet file with a string column "text"'
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if "text" not in columns:
                raise _unusable(path, f'has no column "text", only {", ".join(columns)}; {wanted}')
            yield file
    except UnicodeDecodeError:
        raise _unusable(path, 'the column "text" is not UTF-8; give a file in UTF-8') from None
    except (ArrowException, OSError) as error:
        raise _unusable(path, f"is broken or no Parquet file ({_line(error)}); {wanted}") from error
