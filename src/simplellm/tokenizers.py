"""Text to token ids and back, with a SentencePiece model (Kudo and Richardson, arXiv 1808.06226) or a tokenizer.json.

The shipped model has 4,096 pieces, trained on stories by byte pair encoding (Sennrich, Haddow and Birch, arXiv
1508.07909) with `train_tokenizer`. It encodes characters without a piece as bytes, like Llama's tokenizer.
"""

import functools
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import SentencePieceProcessor

from simplellm.errors import InputError

SHIPPED_MODEL = Path(__file__).with_name("tokenizer.model")

# SentencePiece writes a space as this character, and therefore reads the character itself as a space.
META_SPACE = "\u2581"
PART_CHARACTERS = 1 << 16  # of a long text, encoded at once: some hundredths of a second


class SPTokenizer:
    """A SentencePiece model as a tokenizer.

    With the shipped model, `decode(encode(text)) == text` for every text that is valid Unicode. Other models may change
    the text (Llama's, for example, puts a space before it).

    Args:
        path: a SentencePiece model (.model), or a tokenizer.json (`simplellm.hub_tokenizer`); None for the shipped one.

    Attributes:
        vocab_size: the number of ids, which are 0 to vocab_size - 1.
        bos_id, eos_id, pad_id: the ids of the beginning and the end of a document and of padding; -1 if the model has
            none. No text encodes to them: "</s>" in a text is treated as four ordinary characters.
        identity: stands for the ids that it gives: SHA-256 of its file, and the library's version.

    Raises:
        InputError: there is no tokenizer at this path.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._model, self.identity = _load(SHIPPED_MODEL if path is None else Path(path))
        self._is_sentencepiece = isinstance(self._model, SentencePieceProcessor)
        self.vocab_size: int = self._model.vocab_size()
        self.bos_id: int = self._model.bos_id()
        self.eos_id: int = self._model.eos_id()
        self.pad_id: int = self._model.pad_id()
        self._adds_space = self._keeps_space_before("a")
        self._meta_space_bytes = self._bytes_of_meta_space()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without beginning- or end-of-document tokens."""
        ids, begin = self.encode_part(text)
        while begin < len(text):
            part, begin = self.encode_part(text, begin)
            ids += part
        return ids

    def encode_part(self, text: str, begin: int = 0) -> tuple[list[int], int]:
        """Return the ids of the next part of a text, and the character at which the part after it begins.

        So the use of a long text need not wait seconds for its end. It is cut at spaces between letters or digits, if
        no piece crosses such a space: then the ids of one side do not depend on the other side, because both algorithms
        of SentencePiece only join characters to pieces. Parts that fit in the processor's cache are also encoded three
        times as fast as a text of megabytes.

        Args:
            text: the whole text.
            begin: the character at which the part begins: 0, or as returned for the part before it.
        """
        if len(text) - begin > PART_CHARACTERS and self._is_cut_at_spaces:
            cut = re.compile("(?<=[A-Za-z0-9]) (?=[A-Za-z0-9])").search(text, begin + PART_CHARACTERS)
            if cut is not None:
                end = cut.end() if self._adds_space else cut.start()
                return self._encode_whole(text[begin : cut.start()]), end
        return self._encode_whole(text[begin:]), len(text)

    def _encode_whole(self, text: str) -> list[int]:
        if self._meta_space_bytes is None or META_SPACE not in text:
            ids: list[int] = self._model.encode(text)
            return ids
        first, *others = (self._model.encode(part) for part in text.split(META_SPACE))
        return [*first, *(id for part in others for id in (*self._meta_space_bytes, *part))]

    @functools.cached_property
    def _is_cut_at_spaces(self) -> bool:
        """True if no piece has a space after another character, and a space at the beginning of a text is kept."""
        if not self._keeps_space_before(" a"):
            return False
        pieces = map(self._model.id_to_piece, range(self.vocab_size))
        return not any(META_SPACE in piece.lstrip(META_SPACE) for piece in pieces)

    def _keeps_space_before(self, text: str) -> bool:
        """Return whether the first piece of a text begins with a space; False for a tokenizer.json."""
        return self._is_sentencepiece and self._model.encode(text, out_type=str)[0].startswith(META_SPACE)

    def decode(self, ids: Sequence[int] | Any) -> str:
        """Return the text of ids (a list, or a one-dimensional tensor or array). Special tokens give no text."""
        text: str = self._model.decode(ids.tolist() if hasattr(ids, "tolist") else list(ids))
        return text

    def special_pieces(self) -> dict[str, str]:
        """Return the texts of the special tokens "bos", "eos", "pad" and "unk", if the model has them."""
        ids = {"bos": self.bos_id, "eos": self.eos_id, "pad": self.pad_id, "unk": self._model.unk_id()}
        return {name: self._model.id_to_piece(id) for name, id in ids.items() if id >= 0}

    def _bytes_of_meta_space(self) -> list[int] | None:
        """Return the ids that encode U+2581 itself, not as a space; None if this model cannot distinguish the two.

        It cannot if it has no pieces for bytes, or if it puts a space before a text, so that a text cannot be encoded
        in parts.
        """
        if not self._is_sentencepiece:
            return None
        ids: list[int] = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in META_SPACE.encode()]
        return ids if all(map(self._model.is_byte, ids)) and not self._adds_space else None


def _load(path: Path) -> tuple[Any, str]:
    """Return the model at a path, and its identity."""
    wanted = "give the path of a SentencePiece model (.model), or leave it out for the shipped one"
    try:
        if path.is_fifo() or path.is_char_device():  # reading it might never end
            raise InputError(f"tokenizer {path}: is not a file; {wanted}", "tokenizer")
        model = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"tokenizer {path}: there is no such file; {wanted}", "tokenizer") from None
    except OSError as error:
        raise InputError(f"tokenizer {path}: cannot be read ({error.strerror}); {wanted}", "tokenizer") from None
    digest = hashlib.sha256(model).hexdigest()
    if is_json(model):
        from simplellm.hub_tokenizer import HubTokenizer

        try:
            hub = HubTokenizer(model, path.parent)
            return hub, f"{digest} {hub.version} {hub.added}"
        except InputError:
            raise
        except (ValueError, LookupError, TypeError, RecursionError):
            raise InputError(
                f"tokenizer {path}: is not a tokenizer.json that can be read; {wanted}", "tokenizer"
            ) from None
    try:
        # SentencePiece accepts an empty file as a model, and fails later.
        return _parse(model or b"?"), f"{digest} {sentencepiece.__version__}"
    except RuntimeError:
        raise InputError(f"tokenizer {path}: is not a SentencePiece model; {wanted}", "tokenizer") from None


@functools.lru_cache(1)
def _parse(model: bytes) -> SentencePieceProcessor:
    """Return a model that is only read; the settings and each loader of a run, also of forks, ask for the same one."""
    return SentencePieceProcessor(model_proto=model)


def is_json(content: bytes) -> bool:
    """Return whether a file seems to be a tokenizer.json; a SentencePiece model does not begin with a brace."""
    return content.lstrip()[:1] == b"{" and b'"model"' in content


def with_unused_pieces(model: bytes, count: int) -> bytes:
    """Return a SentencePiece model with `count` more pieces, to which no text encodes: for a padded vocabulary."""
    # Fields of sentencepiece_model.proto: ModelProto.pieces = 1; SentencePiece.piece = 1, .score = 2, .type = 3.
    parts, unused = [model], 5
    for number in range(count):
        text = f"<padding {number}>".encode()
        piece = bytes([1 << 3 | 2, len(text)]) + text + bytes([2 << 3 | 5]) + bytes(4) + bytes([3 << 3, unused])
        parts.append(bytes([1 << 3 | 2, len(piece)]) + piece)
    return b"".join(parts)
