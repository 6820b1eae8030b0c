"""Files of tokens, in a cache that the processes of a user share: text is encoded once.

A file has one chunk of tokens. Its first line is JSON after its checksum: the identity (the data, the tokenizer and the
code from which the tokens come), the chunk's place in the documents, its sizes, and the checksum of the tokens. Then
come the places where documents end (int64), and the tokens (unsigned, of 16 or 32 bits). A file is only ever replaced
as a whole, so that processes can map it into their memory. It may be deleted at any time; its text is then encoded
again. All checksums are CRC-32.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplellm.errors import tell

CACHE = "SIMPLELLM_CACHE"  # variable of the environment: the folder of all files of tokens; empty for none
LINE = 64  # bytes: the first line is a multiple, which aligns the numbers after it
SECONDS_FOR_A_CHUNK = 5.0  # a process that holds the lock for longer is stuck
NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT)  # then a chunk stays in memory


class Place(NamedTuple):
    """The beginning of a token in the documents."""

    document: int
    offset: int = 0  # number of the token in its document
    character: int = 0  # number of its first character


class Chunk(NamedTuple):
    """Successive tokens of the documents."""

    begin: Place
    end: Place  # the beginning of the next chunk; of the last one: the number of documents, 0, 0
    is_last: bool  # whether the data ends with it
    ends: NDArray[Any]  # (documents that end here,): tokens of this chunk up to and including each one's last
    tokens: NDArray[Any]  # (tokens,)
    checksum: int | None = None  # of the tokens, if they have yet to be checked

    def position(self, index: int) -> tuple[int, int]:
        """Return the document of a token, and the token's number in it; the token is in this chunk, or comes next."""
        document = int(np.searchsorted(self.ends, index, side="right"))
        return self.begin.document + document, index - self._start(document)

    def index_of(self, document: int, offset: int) -> int:
        """Return the number in this chunk of a token of a document; `LookupError` with the document's length."""
        number = document - self.begin.document
        start, end = self._start(number), self.ends[number] if number < len(self.ends) else len(self.tokens)
        if start + offset >= end:
            raise LookupError(int(end - start))
        return start + offset

    def _start(self, number: int) -> int:
        return int(self.ends[number - 1]) if number else -self.begin.offset


def folder_of(identity: Mapping[str, Any]) -> Path | None:
    """Return the folder of the tokens with an identity; None if the user has no cache."""
    cache = os.environ.get(CACHE)
    if cache is None:
        cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "simplellm")
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    return Path(cache, "tokens", name) if os.path.isabs(cache) else None


def read_or_build(path: Path, identity: Mapping[str, Any], build: Callable[[], Chunk]) -> Chunk:
    """Return the chunk of a file, mapped into memory. If there is none, or a broken one, build it, once on a host.

    Raises:
        OSError: the disk is full, or fails.
    """
    if (chunk := _read(path, identity, _tell_broken)) is not None:
        return chunk
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name("lock")):
            if (chunk := _read(path, identity, lambda _: None)) is not None:  # another process was first
                return chunk
            chunk = build()
            _write(path, identity, chunk)
    except OSError as error:
        if error.errno in NO_PLACE:
            return chunk or build()
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from error
    return _read(path, identity, _tell_broken) or chunk


def checked(path: Path, chunk: Chunk, build: Callable[[], Chunk]) -> Chunk:
    """Return the chunk of a file after a check of its tokens, which are encoded again if the file is broken."""
    if zlib.crc32(chunk.tokens.data) != chunk.checksum:
        _tell_broken(path)
        with contextlib.suppress(OSError):
            path.unlink()
        chunk = build()
    return chunk._replace(checksum=None)


def _read(path: Path, identity: Mapping[str, Any], tell: Callable[[Path], None]) -> Chunk | None:
    """Return the chunk of a file, whose tokens have yet to be checked; None if there is none, or if it is broken."""
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        line = content.readline()
        checksum, head = int(line[:8], 16), json.loads(line[9:])
        ends = np.frombuffer(content, np.int64, head["documents"], len(line))
        tokens = np.frombuffer(content, f"u{head['bits'] // 8}", head["tokens"], len(line) + ends.nbytes)
        is_whole = len(content) == len(line) + ends.nbytes + tokens.nbytes
        if is_whole and checksum == zlib.crc32(ends.data, zlib.crc32(line[9:])) and head["identity"] == identity:
            begin, end = Place(*head["begin"]), Place(*head["end"])
            return Chunk(begin, end, head["is_last"], ends, tokens, head["checksum"])
    except OSError:
        return None
    except (ValueError, LookupError, TypeError):
        pass
    tell(path)
    return None


def _tell_broken(path: Path) -> None:
    tell(f"{path} is broken: its tokens are encoded again")


def _write(path: Path, identity: Mapping[str, Any], chunk: Chunk) -> None:
    head = {
        **{"begin": chunk.begin, "end": chunk.end, "is_last": chunk.is_last, "checksum": zlib.crc32(chunk.tokens.data)},
        **{"documents": len(chunk.ends), "tokens": len(chunk.tokens), "bits": 8 * chunk.tokens.itemsize},
        "identity": identity,
    }
    line = json.dumps(head)
    line += " " * (-(len(line) + 10) % LINE) + "\n"
    checksum = zlib.crc32(chunk.ends.data, zlib.crc32(line.encode()))
    building = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with building.open("wb") as file:
            file.write(f"{checksum:08x} {line}".encode() + chunk.ends.tobytes() + chunk.tokens.tobytes())
        building.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            building.unlink()
        raise


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
