"""Files of tokens, in a cache that the processes of a user share: text is encoded once.

A file has one chunk of tokens, as NumPy's .npz, whose members have checksums (CRC-32): its place in the documents; the
name of the folder, which identifies the data, the tokenizer and the code from which the tokens come; the places where
documents end; and the tokens, in 16 or 32 bits. A file is only ever replaced as a whole. It may be deleted at any time;
its text is then encoded again.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplellm.errors import tell

CACHE = "SIMPLELLM_CACHE"  # variable of the environment: the folder of all files of tokens; empty for none
SECONDS_FOR_A_CHUNK = 5.0  # a process that holds the lock for longer is stuck
NO_PLACE = errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.EEXIST  # then it stays in memory


class TokenStart(NamedTuple):
    """The beginning of a token in the documents."""

    document: int
    offset: int = 0  # number of the token in its document
    character: int = 0  # number of its first character


@dataclass(frozen=True, eq=False)
class Chunk:
    """Successive tokens of the documents."""

    begin: TokenStart
    end: TokenStart  # the beginning of the next chunk; of the last one: the number of documents, 0, 0
    is_last: bool  # whether the data ends with it
    ends: NDArray[Any]  # (documents,): tokens of this chunk up to and including the last of each document
    tokens: NDArray[Any]  # (tokens,)

    def __len__(self) -> int:
        return len(self.tokens)

    def position(self, index: int) -> tuple[int, int]:
        """Return the document of a token, and the token's number in it; the token is in this chunk, or comes next."""
        document = int(np.searchsorted(self.ends, index, side="right"))
        return self.begin.document + document, index - self._start(document)

    def index_of(self, document: int, offset: int) -> int:
        """Return the number in this chunk of a token of a document; `LookupError` with the document's length."""
        number = document - self.begin.document
        start, end = self._start(number), self.ends[number] if number < len(self.ends) else len(self)
        if start + offset >= end:
            raise LookupError(int(end - start))
        return start + offset

    def _start(self, number: int) -> int:
        return int(self.ends[number - 1]) if number else -self.begin.offset


def chunk_in_file(folder: Path, begin: TokenStart, build: Callable[[], Chunk]) -> Chunk:
    """Return the chunk that begins here, from its file. If there is none, or a broken one, build it, once on a host.

    Raises:
        OSError: the disk is full, or fails.
    """
    path = folder / f"{begin.document}-{begin.character}.tokens"
    if (chunk := _read(path, begin)) is not None:
        return chunk
    with contextlib.ExitStack() as lock:
        with _in_its_place(path):
            folder.mkdir(parents=True, exist_ok=True)
            lock.enter_context(_locked(folder / "lock"))
        if (chunk := _read(path, begin)) is not None:  # another process was first
            return chunk
        if os.path.exists(path):
            tell(f"{path} is broken: its tokens are encoded again")
        chunk = build()
        with _in_its_place(path):
            _write(path, chunk)
    return chunk


def _read(path: Path, begin: TokenStart) -> Chunk | None:
    """Return the chunk in a file; None if there is no file, or a broken one."""
    try:
        with np.load(path) as file:
            start, end = (TokenStart(*place) for place in file["places"].tolist())
            if (start, str(file["identity"])) == (begin, path.parent.name):
                return Chunk(begin, end, bool(file["is_last"]), file["ends"], file["tokens"])
    except Exception:  # of many kinds, from NumPy and zipfile
        return None
    return None


def _write(path: Path, chunk: Chunk) -> None:
    content, building = io.BytesIO(), path.with_name(f".{path.name}.{os.getpid()}")
    places, identity = (chunk.begin, chunk.end), path.parent.name
    np.savez(content, places=places, identity=identity, is_last=chunk.is_last, ends=chunk.ends, tokens=chunk.tokens)
    try:
        building.write_bytes(content.getbuffer())
        building.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            building.unlink()
        raise


@contextlib.contextmanager
def _in_its_place(path: Path) -> Iterator[None]:
    """Ignore errors which mean that a file cannot be kept there; name it in others."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_PLACE:
            raise OSError(error.errno, error.strerror, error.filename or str(path)) from error


def folder_of(identity: Mapping[str, Any]) -> Path | None:
    """Return the folder of the tokens with an identity; None if the user has no cache."""
    cache = os.environ.get(CACHE)
    if cache is None:
        cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "simplellm")
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    return Path(cache, "tokens", name) if os.path.isabs(cache) else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from building the same; without effect where files cannot be locked, or one is stuck."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + SECONDS_FOR_A_CHUNK
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.002)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)
