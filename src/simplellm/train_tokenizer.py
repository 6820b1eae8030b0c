"""Train a tokenizer on a text of your own: a SentencePiece model.

    python -m simplellm.train_tokenizer --data stories.txt --out stories.model
    python -m simplellm.train_tokenizer --data tinystories.jsonl --out tokenizer.model --generated    the shipped one

SentencePiece (Kudo and Richardson, arXiv 1808.06226) trains byte pair encoding with the options of Llama's tokenizer,
except that no space is put before a text. The same text gives the same file. Half of the text of the shipped tokenizer
is generated stories and half is real TinyStories (Eldan and Li, arXiv 2305.07759), so that the pieces suit both.
"""

import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from simplellm import command_line
from simplellm.errors import InputError, require
from simplellm.sources.files import open_file
from simplellm.stories import story
from simplellm.tokenizers import SPTokenizer

# Every character of a keyboard gets its own piece, whether or not the text uses it.
KEYBOARD = "".join(map(chr, range(ord("!"), ord("~") + 1))) + "\n\t"
BYTES = 256  # each has a piece
LARGEST_VOCABULARY = 1 << 20
LONGEST_TEXT = 1 << 20  # bytes; SentencePiece skips longer texts


@dataclass
class Settings:
    """The text to train a tokenizer on, and its size."""

    data: str
    """text: a .txt, .jsonl or .parquet file, all of it is used"""
    out: Path
    """the file to write"""
    vocab_size: int = 4096
    """number of pieces"""
    generated: bool = False
    """put a generated story after each document, as for the shipped tokenizer"""


def train(documents: Iterable[str], vocab_size: int) -> bytes:
    """Return a SentencePiece model; the ids 0 to 3 are unknown, beginning, end and padding.

    Raises:
        InputError: these documents do not give this many pieces, or need more.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            # From memory to memory, because the model would record the names of its training files.
            sentence_iterator=(part for document in documents for part in parts_of(document)),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            required_chars=KEYBOARD,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            split_digits=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            max_sentence_length=LONGEST_TEXT,  # a story is one "sentence": line breaks are part of it
            num_threads=1,
            minloglevel=2,  # errors only
        )
    except RuntimeError as error:
        raise InputError(f"vocab_size {vocab_size}: {_reason(str(error))}", "vocab_size") from None
    return model.getvalue()


def _reason(message: str) -> str:
    """Return SentencePiece's message; known ones in the terms of this command."""
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"bytes and the characters of the text need at least {least[1]} pieces"
    if most := re.search(r"Vocabulary size too high.* <= (\d+)", message):
        return f"this text gives at most {most[1]} pieces"
    return message


def parts_of(document: str, longest: int = LONGEST_TEXT) -> list[str]:
    """Split a document into parts of at most `longest` bytes, at the ends of lines where possible."""
    width = longest // 4  # characters, of at most four bytes each
    lines = document.splitlines(keepends=True)
    parts, size_bytes = list[list[str]]([[]]), 0
    for piece in (line[start : start + width] for line in lines for start in range(0, len(line), width)):
        size_bytes += len(piece.encode())
        if size_bytes > longest:
            parts.append([])
            size_bytes = len(piece.encode())
        parts[-1].append(piece)
    return ["".join(part) for part in parts]


def training_text(data: str, generated: bool) -> Iterator[str]:
    """Yield the documents of a file, each followed by a generated story if asked for."""
    for index, document in enumerate(open_file(data).read(0)):
        yield document
        if generated:
            yield story(index, seed=1, split="tokenizer")


def _is_tokenizer(path: Path) -> bool:
    """Return whether a file may be replaced by a tokenizer: it is one, or is empty."""
    try:
        return path.stat().st_size == 0 or bool(SPTokenizer(path))
    except (InputError, OSError):
        return False


def write(settings: Settings) -> None:
    data, out, vocab_size = settings.data, Path(os.path.expanduser(settings.out)), settings.vocab_size
    sizes = f"as every byte has a piece, give more than {BYTES}, and at most {LARGEST_VOCABULARY:,}"
    require(BYTES < vocab_size <= LARGEST_VOCABULARY, f"vocab_size {vocab_size}: {sizes}", "vocab_size")
    source = open_file(data)
    require(out.parent.is_dir(), f"out {out}: there is no folder {out.parent}", "out")
    is_free = not out.exists()
    require(is_free or out.is_file(), f"out {out}: is a folder or a device; give the path of a file", "out")
    require(is_free or not out.samefile(Path(os.path.expanduser(data))), f"out {out}: would replace the text", "out")
    # Reads every document, so that an error in the last one is found before training.
    documents = sum(bool(text.strip()) for text in source.read(0))
    require(documents > 0, f"data {data}: the file holds no document; give one with text in it", "data")
    require(is_free or _is_tokenizer(out), f"out {out}: is a file that is not a tokenizer; give a new path", "out")
    model = train(training_text(data, settings.generated), vocab_size)
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        unfinished.write_bytes(model)
        os.replace(unfinished, out)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise InputError(f"out {out}: cannot be written ({error.strerror})", "out") from None
    print(f"{out}: {vocab_size:,} pieces, {len(model):,} bytes")


command = command_line.as_command(write, Settings, __doc__)

if __name__ == "__main__":
    command_line.run(write, Settings, __doc__)
