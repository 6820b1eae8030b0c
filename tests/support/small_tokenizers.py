"""Small SentencePiece models of other kinds than the shipped one."""

import io
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer

from simplellm.stories import story

# As Llama's tokenizer: it puts a space before a text, and else changes nothing.
LIKE_LLAMA = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
TRICKY = [  # texts that tokenizers often change
    "",
    " ",
    "  leading, inner  and trailing   ",
    "\u2581",
    "a\u2581b \u2581 \u2581\u2581 c\u2581",
    "\x00",
    "before\x00after",
    "\r\n \r \n\n\n \t\v\f\x85\u2028\u2029",
    "<s> </s> <unk> <pad> <0x0A> <0xE2><0x96><0x81>",
    "\ufeffbyte order mark",
    "é e\u0301 ﬁ Ⅳ ½ \uff21\uff22",
    "👩‍👩‍👧 🇨🇭 ☃️",
    "日本語 العربية हिन्दी",
    "\ue000 \U000f0000 \u0378 \ufffe \uffff \U0010ffff",
    "\ufffd \u2047 ⁇",
]


def trained(path: Path, **options: Any) -> Path:
    """Train a model on stories, by SentencePiece's own defaults but for the options, and write it to `path`."""
    model = io.BytesIO()
    stories = iter([story(index) for index in range(40)])
    defaults: dict[str, Any] = {"sentence_iterator": stories, "model_type": "bpe", "vocab_size": 600}
    defaults["num_threads"] = 1  # with more, OpenMP would use them again in forks, which do not have them
    SentencePieceTrainer.train(model_writer=model, minloglevel=2, **defaults | options)
    path.write_bytes(model.getvalue())
    return path
