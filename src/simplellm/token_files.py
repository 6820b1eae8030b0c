"""Files of tokens, in a cache that the processes of a user share: text is encoded once.

A file has one chunk of tokens. It begins with the chunk's head: its place in the documents, its sizes, and the name of
the folder, which identifies the data, the tokenizer and the code from which the tokens come. Then come the places where
documents end (int64), the checksums of pieces of the tokens (uint32), and the tokens (unsigned, of 16 or 32 bits). Of a
chunk that a rank passes over, only the head is read, and of a chunk that it uses, only its own pieces are checked. A
file is only ever replaced as a whole, so that processes can map it into their memory. It may be deleted at any time;
its text is then encoded again. All checksums are CRC-32.
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplellm.errors import tell

CACHE = "SIMPLELLM_CACHE"  # variable of the environment: the folder of all files of tokens; empty for none
# Checksum of the rest; begin, end, whether it is the last, documents, tokens; bits of a token, checksum of what lies
# between this and the tokens, identity; padded, so that the numbers that follow are aligned.
HEAD = struct.Struct("<I 6q ? 2q B I 32s 22x")
PIECE = 2**12  # tokens under one checksum
SECONDS_FOR_A_CHUNK = 5.0  # a process that holds the lock for longer is stuck
NO_PLACE = errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.EEXIST  # then it stays in memory


class TokenStart(NamedTuple):
    """The beginning of a token in the documents."""

    document: int
    offset: int = 0  # number of the token in its document
    character: int = 0  # number of its first character


class Head(NamedTuple):
    """The place and the sizes of a chunk."""

    begin: TokenStart
    end: TokenStart  # the beginning of the next chunk; of the last one: the number of documents, 0, 0
    is_last: bool  # whether the data ends with it
    documents: int  # that end here
    tokens: int


class Content(NamedTuple):
    """The tokens of a chunk."""

    ends: NDArray[Any]  # (documents,): tokens of this chunk up to and including the last of each document
    tokens: NDArray[Any]  # (tokens,)
    unchecked: dict[int, int]  # by number, the checksums of the pieces of the tokens that have yet to be checked


class Chunk:
    """Successive tokens of the documents. Those of a file are mapped into memory when they are first used."""

    def __init__(self, head: Head, content: Content | None = None, file: "TokenFile | None" = None) -> None:
        self.head, self._content, self._file = head, content, file

    def __len__(self) -> int:
        return self.head.tokens

    @property
    def content(self) -> Content:
        """The tokens, of which the `unchecked` have yet to be checked."""
        if self._content is None:
            assert self._file is not None
            self._content = self._file.content(self.head)
        return self._content

    def tokens(self, begin: int, end: int) -> NDArray[Any]:
        """Return the tokens from one number up to another, (end - begin,), after a check of a file's."""
        _, tokens, unchecked = self.content
        for piece in range(begin // PIECE, -(-end // PIECE)) if unchecked else ():
            checksum = unchecked.pop(piece, None)
            if checksum is not None and checksum != zlib.crc32(tokens[piece * PIECE : (piece + 1) * PIECE].data):
                assert self._file is not None
                self._content = self._file.rebuild()
                break
        return self.content.tokens[begin:end]

    def position(self, index: int) -> tuple[int, int]:
        """Return the document of a token, and the token's number in it; the token is in this chunk, or comes next."""
        document = int(np.searchsorted(self.content.ends, index, side="right"))
        return self.head.begin.document + document, index - self._start(document)

    def index_of(self, document: int, offset: int) -> int:
        """Return the number in this chunk of a token of a document; `LookupError` with the document's length."""
        number, ends = document - self.head.begin.document, self.content.ends
        start, end = self._start(number), ends[number] if number < len(ends) else len(self)
        if start + offset >= end:
            raise LookupError(int(end - start))
        return start + offset

    def _start(self, number: int) -> int:
        return int(self.content.ends[number - 1]) if number else -self.head.begin.offset


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
        if (head := self._head(_tell_broken)) is not None:
            return Chunk(head, file=self)
        with contextlib.ExitStack() as lock:
            with self._in_its_place():
                self.folder.mkdir(parents=True, exist_ok=True)
                lock.enter_context(_locked(self.folder / "lock"))
            if (head := self._head(lambda _: None)) is not None:  # another process was first
                return Chunk(head, file=self)
            chunk = self.build()
            with self._in_its_place():
                self._write(chunk)
        return chunk

    def content(self, head: Head) -> Content:
        """Map the chunk's tokens into memory; build the chunk again if the file is broken or gone."""
        try:
            with self.path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            *_, bits, checksum, _ = HEAD.unpack_from(content)
            ends = np.frombuffer(content, np.int64, head.documents, HEAD.size)
            checksums = np.frombuffer(content, np.uint32, _pieces(head.tokens), HEAD.size + ends.nbytes)
            before = HEAD.size + ends.nbytes + checksums.nbytes
            tokens = np.frombuffer(content, f"u{bits // 8}", head.tokens, before)
            if checksum == zlib.crc32(content[HEAD.size : before]):
                return Content(ends, tokens, dict(enumerate(checksums.tolist())))
        except FileNotFoundError:
            return self.build().content
        except (ValueError, TypeError, struct.error):
            pass
        return self.rebuild()

    def rebuild(self) -> Content:
        """Build the chunk of a broken file, and the file, again."""
        _tell_broken(self.path)
        chunk = self.build()
        with self._in_its_place():
            self._write(chunk)
        return chunk.content

    def _head(self, tell: Callable[[Path], None]) -> Head | None:
        """Return the head of the file; None if there is none, or if it is broken."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                packed = os.read(descriptor, HEAD.size)
            finally:
                os.close(descriptor)
            checksum, *place, is_last, documents, tokens, _, _, identity = HEAD.unpack(packed)
            if (checksum, *place[:3], identity) == (zlib.crc32(packed[4:]), *self.begin, self.folder.name.encode()):
                return Head(self.begin, TokenStart(*place[3:]), is_last, documents, tokens)
        except OSError:
            return None
        except struct.error:
            pass
        tell(self.path)
        return None

    def _write(self, chunk: Chunk) -> None:
        ends, tokens, _ = chunk.content
        pieces = (tokens[start : start + PIECE] for start in range(0, len(tokens), PIECE))
        checksums = np.array([zlib.crc32(piece.data) for piece in pieces], np.uint32)
        before = ends.tobytes() + checksums.tobytes()
        begin, end, *sizes = chunk.head
        bits, identity = 8 * tokens.itemsize, self.folder.name.encode()
        packed = HEAD.pack(0, *begin, *end, *sizes, bits, zlib.crc32(before), identity)[4:]
        building = self.folder / f".{self.path.name}.{os.getpid()}"
        try:
            with building.open("wb") as file:
                file.write(zlib.crc32(packed).to_bytes(4, "little") + packed + before + tokens.tobytes())
            building.replace(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
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


def _tell_broken(path: Path) -> None:
    tell(f"{path} is broken: its tokens are encoded again")


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
