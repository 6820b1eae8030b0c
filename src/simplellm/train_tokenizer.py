"""Train a tokenizer, for --tokenizer: a SentencePiece model of a text of your own.

    python -m simplellm.train_tokenizer --data stories.txt --out stories.model
    python -m simplellm.train_tokenizer --data tinystories.jsonl --out tokenizer.model --generated    the shipped one

SentencePiece (Kudo and Richardson, arXiv 1808.06226) trains byte pair encoding with the options of Llama's tokenizer,
except that no space is put before a text. The same text gives the same file. Half of the text of the shipped tokenizer
is generated stories and half is real TinyStories (Eldan and Li, arXiv 2305.07759), so that the pieces suit both.
"""

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from simplellm import command_line
from simplellm.errors import InputError, require
from simplellm.sources import open_file
from simplellm.stories import story

# Every character of a keyboard gets a piece of its own, whether or not the text uses it.
KEYBOARD = "".join(map(chr, range(ord("!"), ord("~") + 1))) + "\n\t"


@dataclass
class Settings:
    """What to train a tokenizer on."""

    data: str
    """text: a .txt, .jsonl or .parquet file, as of a run's --data; all of it is used"""
    out: Path
    """the file to write"""
    vocab_size: int = 4096
    """number of pieces"""
    generated: bool = False
    """put a generated story after each document, as for the shipped tokenizer"""


def train(documents: Iterable[str], vocab_size: int) -> bytes:
    """A SentencePiece model; the ids 0 to 3 are unknown, beginning, end and padding.

    Raises:
        InputError: these documents do not give so many pieces, or more are needed.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            # From memory to memory, because the model would record the names of the files that it was trained from.
            sentence_iterator=iter(documents),
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
            max_sentence_length=1 << 20,  # a story is one "sentence": line breaks are part of it
            num_threads=1,
            minloglevel=1,
        )
    except RuntimeError as error:
        raise InputError(f"--vocab-size {vocab_size}: {_reason(str(error))}") from None
    return model.getvalue()


def _reason(message: str) -> str:
    """What SentencePiece says, in the words of this command where it is known."""
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"bytes and the characters of the text need at least {least[1]} pieces"
    if most := re.search(r"Vocabulary size too high.* <= (\d+)", message):
        return f"this text gives at most {most[1]} pieces"
    return message.rpartition("] ")[2].strip()


def training_text(data: str, generated: bool) -> Iterator[str]:
    """The documents of a file, each followed by a generated story if asked for."""
    for index, document in enumerate(open_file(data).read(0)):
        yield document
        if generated:
            yield story(index, seed=1, split="tokenizer")


def write(settings: Settings) -> None:
    data, out = settings.data, settings.out
    require(settings.vocab_size > 0, f"--vocab-size {settings.vocab_size}: must be at least 1")
    require(out.parent.is_dir(), f"--out {out}: there is no folder {out.parent}")
    documents = sum(bool(text.strip()) for text in open_file(data).read(0))  # of all, to find an error before training
    require(documents > 0, f"--data {data}: the file has no text; give one that has")
    model = train(training_text(data, settings.generated), settings.vocab_size)
    try:
        out.write_bytes(model)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written ({error.strerror})") from None
    print(f"{out}: {settings.vocab_size} pieces, {len(model)} bytes")


if __name__ == "__main__":
    command_line.run(write, Settings, __doc__)
