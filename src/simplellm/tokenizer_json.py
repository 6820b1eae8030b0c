"""Converts a SentencePiece model to the format of Hugging Face's `tokenizers` library: same text, same ids.

Spaces stay spaces here; SentencePiece writes them as U+2581. So, as with `SPTokenizer`, a text that contains that
character is not mistaken for a text with spaces.

Some models normalize text (SentencePiece does by default, with "nmt_nfkc"; the shipped model does not). Their
normalization table is copied. `tokenizers` applies it grapheme by grapheme, so the ids may differ for letters that
consist of several characters; and it turns U+2581 into a space even where `SPTokenizer` would not.
"""

import base64
import re
import struct
from pathlib import Path
from typing import Any

from simplellm.errors import InputError
from simplellm.tokenizers import META_SPACE, SPTokenizer

UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # SentencePiece.Type; there are also unused pieces, and bytes


def as_tokenizer_json(model: Path) -> dict[str, Any]:
    """Return the content of tokenizer.json for a SentencePiece model file.

    Raises:
        InputError: the file is not a SentencePiece model, or `tokenizers` could not reproduce its ids.
    """
    SPTokenizer(model)
    # Field numbers are those of sentencepiece_model.proto.
    proto = _fields(model.read_bytes())
    trainer, normalizer = _fields(proto[2][0]), _fields(proto[3][0])
    pieces = [_piece(_fields(message)) for message in proto[1]]
    bytes_for_unknown = bool(trainer.get(35, [0])[0])
    space_before = bool(normalizer.get(3, [1])[0])
    user_defined = [text for text, _, kind in pieces if kind == USER_DEFINED]

    kind = trainer.get(3, [UNIGRAM])[0]
    if kind not in (UNIGRAM, BPE):
        raise InputError(f"{model}: splits text into words or characters; only BPE and unigram models can be exported")
    if trainer.get(24, [0])[0]:
        raise InputError(f"{model}: treats a space as the end of a word; only one at its beginning can be exported")
    if user_defined and (space_before or kind == UNIGRAM):
        raise InputError(
            f"{model}: has the user-defined symbol {user_defined[0]!r}, which can be exported only from BPE models "
            "that put no space before a text"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": text, "special": kind != USER_DEFINED}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for id, (text, _, kind) in enumerate(pieces)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(normalizer, space_before, bytes_for_unknown)},
        "pre_tokenizer": None if kind == BPE else _apart(pieces),
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": _decoders(space_before)},
        "model": _bpe(pieces, bytes_for_unknown) if kind == BPE else _unigram(pieces, bytes_for_unknown),
    }


Piece = tuple[str, float, int]


def _bpe(pieces: list[Piece], byte_fallback: bool) -> dict[str, Any]:
    """Return the list of merges that `tokenizers` needs; SentencePiece merges the neighbors with the best result."""
    normal = {text for text, _, kind in pieces if kind == NORMAL}
    by_score = sorted((piece for piece in pieces if piece[2] == NORMAL), key=lambda piece: -piece[1])
    merges = [
        (text[:cut], text[cut:])
        for text, _, _ in by_score
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    return {
        "type": "BPE",
        "unk_token": next(text for text, _, kind in pieces if kind == UNKNOWN),
        "fuse_unk": True,
        "byte_fallback": byte_fallback,
        "vocab": {text: id for id, (text, _, _) in enumerate(pieces)},
        "merges": merges,
    }


def _unigram(pieces: list[Piece], byte_fallback: bool) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": next(id for id, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN),
        "byte_fallback": byte_fallback,
        "vocab": [(text, score) for text, score, _ in pieces],
    }


def _apart(pieces: list[Piece]) -> dict[str, Any]:
    """Split a literal "</s>" in a text in two; otherwise the unigram model would read it as the end of a document.

    The split is next to a character that has a piece, because neighbors without one become a single unknown piece.
    """
    known = {text for text, _, kind in pieces if kind == NORMAL}
    patterns = []
    for text in (text for text, _, kind in pieces if kind != NORMAL):
        cut = next((cut for cut in range(1, len(text)) if text[cut] in known), 1)
        patterns.append(f"{re.escape(text[:cut])}(?={re.escape(text[cut:])})")
    return {
        "type": "Split",
        "pattern": {"Regex": "|".join(patterns)},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }


def _normalizers(spec: dict[int, list[Any]], space_before: bool, bytes_for_unknown: bool) -> list[dict[str, Any]]:
    """Return the steps that SentencePiece applies to a text before it looks for pieces, in order."""
    steps: list[dict[str, Any]] = []
    if spec.get(2, [b""])[0]:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(spec[2][0]).decode()})
    is_a_space = space_before or not bytes_for_unknown  # U+2581
    if spec.get(4, [1])[0]:  # remove extra white space
        at_the_end = f"[ {META_SPACE}]" if is_a_space else " "
        steps.append({"type": "Replace", "pattern": {"Regex": rf"\A +|{at_the_end}+\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if space_before:
        steps.append({"type": "Prepend", "prepend": " "})
    if is_a_space:
        steps.append({"type": "Replace", "pattern": {"String": META_SPACE}, "content": " "})
    return steps


def _decoders(space_before: bool) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if space_before:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps


def _piece(message: dict[int, list[Any]]) -> Piece:
    """Return text, score (a log probability, or how early BPE made the piece) and kind of a piece."""
    score: float = struct.unpack("<f", message[2][0])[0] if 2 in message else 0.0
    return message[1][0].decode().replace(META_SPACE, " "), score, message.get(3, [NORMAL])[0]


def _fields(message: bytes) -> dict[int, list[Any]]:
    """Return the fields of a protobuf message by their numbers: integers as int, all others as bytes.

    The encoding is explained at https://protobuf.dev/programming-guides/encoding. Parsing it here avoids a dependency.
    """
    fields: dict[int, list[Any]] = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        number, wire_type = divmod(varint(), 8)
        value: int | bytes
        if wire_type == 0:
            value = varint()
        else:
            length = {1: 8, 5: 4}.get(wire_type) or varint()
            value = message[position : position + length]
            position += length
        fields.setdefault(number, []).append(value)
    return fields
