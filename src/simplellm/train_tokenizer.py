"""Train the tokenizer that the project ships.

    python -m simplellm.train_tokenizer --text tinystories.jsonl

Half of the text is generated stories and half is real TinyStories (Eldan and Li, arXiv 2305.07759), so that the pieces
suit both. SentencePiece (Kudo and Richardson, arXiv 1808.06226) trains byte pair encoding with the options of Llama's
tokenizer, except that no space is put before a text. The same text gives the same file.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro
from sentencepiece import SentencePieceTrainer

from simplellm.stories import story
from simplellm.tokenizers import SHIPPED_MODEL

VOCAB_SIZE = 4096
# Every character of a keyboard gets a piece of its own, whether or not the stories use it.
KEYBOARD = "".join(map(chr, range(ord("!"), ord("~") + 1))) + "\n\t"


@dataclass
class Settings:
    """Train a SentencePiece model on stories."""

    text: Path
    """real stories: a .jsonl file with a field "text" on each line"""
    out: Path = SHIPPED_MODEL
    """file to write"""


def train(stories: Iterator[str]) -> bytes:
    """A SentencePiece model with 4,096 pieces; the ids 0 to 3 are unknown, beginning, end and padding."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        # From memory to memory, because the model would record the names of the files that it was trained from.
        sentence_iterator=stories,
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
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
    return model.getvalue()


def training_text(path: Path) -> Iterator[str]:
    """The stories of a .jsonl file, each followed by a generated one."""
    with path.open(encoding="utf-8") as lines:
        for index, line in enumerate(lines):
            yield json.loads(line)["text"]
            yield story(index, seed=1, split="tokenizer")


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    model = train(training_text(settings.text))
    settings.out.write_bytes(model)
    print(f"{settings.out}: {VOCAB_SIZE} pieces, {len(model)} bytes")


if __name__ == "__main__":
    main()
