"""Tokens of documents in chunks: each chunk is encoded when it is first needed, and kept in a file (`token_files`).

A source may have no end, such as the generator, or come slowly over a network, so nothing waits for the whole of it. A
chunk depends only on where it begins. Every 1024th document begins a chunk, so that any place in the data is found
without what comes before it.
"""

import functools
import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from simplellm.errors import InputError
from simplellm.sources import open_source, source_identity
from simplellm.sources.source import Source, unusable
from simplellm.token_files import Chunk, TokenFile, TokenStart, folder_of
from simplellm.tokenizers import SPTokenizer

GROUP = 1024  # documents: some 200,000 tokens of stories
MOST = 2**18  # tokens of a chunk: a third of a second to encode
FIRST = 2**12  # tokens of the first chunk, which a new run waits for; the next ones are longer and longer


class Tokenizer(Protocol):
    """The part of a tokenizer that the batches need."""

    eos_id: int

    def encode(self, text: str) -> list[int]: ...


class TokenChunks:
    """The tokens of a source's documents, each followed by the end-of-document token; the arguments are `TinyStories`'.

    Chunks are kept in files if the data and the tokenizer can be identified, and in memory only as long as they are
    used otherwise: with another kind of tokenizer, an unknown revision of the hub, or a cache that cannot be written.
    """

    def __init__(self, tokenizer: Tokenizer, data: str, split: str, seed: int, revision: str | None) -> None:
        self._tokenizer = tokenizer
        self._arguments = data, split, seed, revision
        self._data_identity = source_identity(*self._arguments)
        self._folder: Path | None = None
        if type(tokenizer) is SPTokenizer and self._data_identity is not None:
            identity = {"data": self._data_identity, "tokenizer": tokenizer.identity, "code": _code()}
            self._folder = folder_of(identity)
        self._count: int | None = None  # of documents, once known
        self._document, self._text = -1, ""  # read last
        self._documents: Iterator[str] | None = None  # after it

    def walk(self, document: int, offset: int) -> Iterator[tuple[int, Chunk]]:
        """Yield the chunks from the one with this token on, endlessly: after the last comes the first.

        Yields:
            The number of documents in earlier passes through the data, and the chunk.

        Raises:
            InputError: there is no such token, or the data cannot be read.
        """
        passed = document - document % self._count if self._count else 0
        place = document - passed, offset
        chunks = self._to_the_end(place[0] // GROUP * GROUP)
        chunk = next(chunk for chunk in chunks if chunk.is_last or chunk.end[:2] > place)
        if chunk.end[:2] <= place:
            self._count = chunk.end.document
            if not self._count:
                raise self._source.no_text()
            yield from self.walk(document, offset)
            return
        try:
            chunk.index_of(*place)
        except LookupError as error:
            raise InputError(
                f"token {offset} of document {document} does not exist ({error} tokens); "
                "go on with the data and the tokenizer that the position is from"
            ) from None
        yield passed, chunk
        while True:
            for chunk in chunks:
                if len(chunk):
                    yield passed, chunk
            passed += chunk.end.document
            chunks = self._to_the_end(0)

    def _to_the_end(self, document: int) -> Iterator[Chunk]:
        """Yield the chunks from this document on, which begins one, to the end of the data."""
        start, is_last = TokenStart(document), False
        while not is_last:
            build = functools.partial(self._encode, start)
            chunk = build() if self._folder is None else TokenFile(self._folder, start, build).chunk()
            yield chunk
            start, is_last = chunk.end, chunk.is_last

    def _encode(self, begin: TokenStart) -> Chunk:
        """Return the chunk that begins here."""
        document, _, character = begin
        tokens: list[int] = []
        ends: list[int] = []
        most = min(MOST, FIRST * (1 + document // 16)) if document < GROUP else MOST
        text: str | None = ""
        while len(tokens) < most and document // GROUP == begin.document // GROUP:
            text = self._read(document)
            if text is None:
                break
            if type(self._tokenizer) is SPTokenizer:
                ids, character = self._tokenizer.encode_part(text, character)
            else:
                ids, character = self._tokenizer.encode(text), len(text)
            tokens += ids
            if character >= len(text):
                tokens.append(self._tokenizer.eos_id)
                ends.append(len(tokens))
                document, character = document + 1, 0
        offset = len(tokens) - ends[-1] if ends else begin.offset + len(tokens)
        if text is None and not tokens:
            document = self._source.count()  # it may be less
        is_file = self._arguments[0] not in ("sample", "tinystories")  # the hub's cache may fill while stories come
        if is_file and source_identity(*self._arguments) != self._data_identity:
            raise unusable(self._arguments[0], "changed while it was read; start the run again")
        kind = np.uint16 if getattr(self._tokenizer, "vocab_size", 2**32) <= 2**16 else np.uint32
        end = TokenStart(document, offset, character)
        return Chunk(begin, end, text is None, np.array(ends, np.int64), np.array(tokens, kind))

    def _read(self, document: int) -> str | None:
        """Return a document of the source; None after the last."""
        if document == self._document:
            return self._text
        ahead = document - self._document - 1
        if self._documents is None or ahead < 0 or (ahead and self._source.starts_anywhere):
            self._documents, ahead = self._source.read(document), 0
        text = next(islice(self._documents, ahead, None), None)
        if text is None:
            self._documents = None
        else:
            self._document, self._text = document, text
        return text

    @functools.cached_property
    def _source(self) -> Source:
        """The source, opened only if there is something to encode; it has text."""
        source = open_source(*self._arguments)
        source.check_text()
        return source


@functools.cache
def _code() -> str:
    """Return the SHA-256 of the files that determine documents and their tokens."""
    here, digest = Path(__file__).parent, hashlib.sha256()
    names = "stories.py", "token_*.py", "tokenizers.py", "hub_tokenizer.py", "sources/*.py", "story_data/*"
    for path in sorted(path for name in names for path in here.glob(name)):
        digest.update(path.read_bytes())
    return digest.hexdigest()
