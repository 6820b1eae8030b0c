"""Files of tokens, in a cache that the processes of a user share: text is encoded once.

A file has one chunk of tokens. It begins with a head: the chunk's place in the documents, its sizes, and the name of
the folder, which identifies the data, the tokenizer and the code from which the tokens come. Then come the places where
documents end (int64), the checksums of pieces of the tokens (uint32), and the tokens (unsigned, of 16 or 32 bits),
which are mapped into memory. Of the tokens, a rank checks only its own pieces. A file is only ever replaced as a whole.
It may be deleted at any time; its text is then encoded again. All checksums are CRC-32.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplellm.errors import tell

CACHE = "SIMPLELLM_CACHE"  # variable of the environment: the folder of all files of tokens; empty for none
# Checksum of what lies between this and the tokens; begin, end, whether it is the last, documents, tokens; bits of a
# token, identity; padded, so that the numbers that follow are aligned.
HEAD = struct.Struct("<I 6q ? 2q B 32s 26x")
PIECE = 2**12  # tokens under one checksum
SECONDS_FOR_A_CHUNK = 5.0  # a process that holds the lock for longer is stuck
NO_PLACE = errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.EEXIST  # then it stays in memory


class TokenStart(NamedTuple):
    """The beginning of a token in the documents."""

    document: int
    offset: int = 0  # number of the token in its document
    character: int = 0  # number of its first character


@dataclass(eq=False)
class Chunk:
    """Successive tokens of the documents."""

    begin: TokenStart
    end: TokenStart  # the beginning of the next chunk; of the last one: the number of documents, 0, 0
    is_last: bool  # whether the data ends with it
    ends: NDArray[Any]  # (documents,): tokens of this chunk up to and including the last of each document
    content: NDArray[Any]  # (tokens,)
    file: "TokenFile | None" = None  # that the tokens are in
    unchecked: dict[int, int] = field(default_factory=dict)  # by number, checksums of the pieces yet to be checked

    def __len__(self) -> int:
        return len(self.content)

    def tokens(self, begin: int, end: int) -> NDArray[Any]:
        """Return the tokens from one number up to another, (end - begin,), after a check of a file's."""
        for piece in range(begin // PIECE, -(-end // PIECE)) if self.unchecked else ():
            checksum = self.unchecked.pop(piece, None)
            if checksum is not None and checksum != zlib.crc32(self.content[piece * PIECE : (piece + 1) * PIECE].data):
                assert self.file is not None
                self.content, self.unchecked = self.file.build_again().content, {}
                break
        return self.content[begin:end]

    def position(self, index: int) -> tuple[int, int]:
        """Return the document of a token of this chunk, and the token's number in it."""
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


class TokenFile(NamedTuple):
    """The file of a chunk. Its folder's name identifies the documents and their tokens."""

    folder: Path
    begin: TokenStart
    build: Callable[[], Chunk]  # encodes its text

    @property
    def path(self) -> Path:
        return self.folder / f"{self.begin.document}-{self.begin.character}.tokens"

    def chunk(self) -> Chunk:
        """Return the chunk. If there is no file, or a broken one, build it, once on a host.

        Raises:
            OSError: the disk is full, or fails.
        """
        if (chunk := self._read()) is not None:
            return chunk
        with contextlib.ExitStack() as lock:
            with self._in_its_place():
                self.folder.mkdir(parents=True, exist_ok=True)
                lock.enter_context(_locked(self.folder / "lock"))
            chunk = self._read()  # another process may have been first
            return self.build_again() if chunk is None else chunk

    def build_again(self) -> Chunk:
        """Build the chunk, and its file in place of a broken one, if there is one."""
        if os.access(self.path, os.R_OK):
            tell(f"{self.path} is broken: its tokens are encoded again")
        chunk = self.build()
        with self._in_its_place():
            self._write(chunk)
        return chunk

    def _read(self) -> Chunk | None:
        """Map the chunk's file into memory; None if there is none, or if it is broken."""
        try:
            with self.path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            checksum, *place, is_last, documents, tokens, bits, identity = HEAD.unpack_from(content)
            ends = np.frombuffer(content, np.int64, documents, HEAD.size)
            checksums = np.frombuffer(content, np.uint32, _pieces(tokens), HEAD.size + ends.nbytes)
            before = HEAD.size + ends.nbytes + checksums.nbytes
            own = zlib.crc32(content[4:before]), *self.begin, self.folder.name.encode()
            if (checksum, *place[:3], identity) != own:
                return None
            unchecked = dict(enumerate(checksums.tolist()))
            numbers = np.frombuffer(content, f"u{bits // 8}", tokens, before)
            return Chunk(self.begin, TokenStart(*place[3:]), is_last, ends, numbers, self, unchecked)
        except (OSError, ValueError, struct.error):
            return None

    def _write(self, chunk: Chunk) -> None:
        tokens, identity = chunk.content, self.folder.name.encode()
        pieces = (tokens[start : start + PIECE] for start in range(0, len(tokens), PIECE))
        checksums = np.array([zlib.crc32(piece.data) for piece in pieces], np.uint32)
        sizes = chunk.is_last, len(chunk.ends), len(tokens), 8 * tokens.itemsize
        head = HEAD.pack(0, *chunk.begin, *chunk.end, *sizes, identity)[4:]
        before = head + chunk.ends.tobytes() + checksums.tobytes()
        building = self.folder / f".{self.path.name}.{os.getpid()}"
        try:
            with building.open("wb") as file:
                file.write(zlib.crc32(before).to_bytes(4, "little") + before + tokens.tobytes())
            building.replace(self.path)
        except BaseException:
            with contextlib.suppress(OSError):  # which would hide why the file was not written
                building.unlink()
            raise

    @contextlib.contextmanager
    def _in_its_place(self) -> Iterator[None]:
        """Ignore errors which mean that the file cannot be kept there; name it in others."""
        try:
            yield
        except OSError as error:
            if error.errno not in NO_PLACE:
                raise OSError(error.errno, error.strerror, error.filename or str(self.path)) from error


def _pieces(tokens: int) -> int:
    return -(-tokens // PIECE)


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
