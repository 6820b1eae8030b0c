"""The shipped tokenizer loses nothing; tokenizer.json, as transformers reads it, against SentencePiece models."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_tokenizers import LIKE_LLAMA, TRICKY, trained

from simplellm.errors import InputError
from simplellm.export import tokenizer_config
from simplellm.stories import story
from simplellm.tokenizer_json import as_tokenizer_json
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

pytestmark = pytest.mark.quick

TEXTS = [*TRICKY, "the end.</s>", "12345 3.14159 -----......!!!!", *(story(index, seed=5) for index in range(3))]
ONLY_SPACES_MATTER = [text for text in TEXTS if "\u0301" not in text and "\u200d" not in text]


def load(model: Path, folder: Path) -> Any:
    """The tokenizer that transformers makes of a SentencePiece model as we write it."""
    (folder / "tokenizer.json").write_text(json.dumps(as_tokenizer_json(model)))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(SPTokenizer(model), 64)))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def assert_same_ids(theirs: Any, ours: SPTokenizer, text: str) -> None:
    ids = ours.encode(text)
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids, text
    assert theirs(text)["input_ids"] == ids, text


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(SHIPPED_MODEL, tmp_path_factory.mktemp("shipped"))


def assert_lossless(shipped: Any, text: str) -> None:
    ids = (ours := SPTokenizer()).encode(text)
    assert_same_ids(shipped, ours, text)
    assert shipped.decode(ids) == ours.decode(ids) == text
    assert not {ours.bos_id, ours.eos_id, ours.pad_id, 0} & set(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_the_shipped_tokenizer(shipped: Any, text: str) -> None:
    assert_lossless(shipped, text)


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(codec="utf-8") | st.sampled_from(" \u2581\n\r\t\x00<>s/ae."), max_size=60))
def test_the_shipped_tokenizer_on_any_text(shipped: Any, text: str) -> None:
    assert_lossless(shipped, text)


def test_special_tokens(shipped: Any) -> None:
    ours = SPTokenizer()
    assert (shipped.bos_token_id, shipped.eos_token_id, shipped.pad_token_id) == (1, 2, 3)
    assert len(shipped) == ours.vocab_size
    story_ids = [1, *ours.encode("The end."), 2, 3]
    assert shipped.decode(story_ids, skip_special_tokens=True) == "The end." == ours.decode(story_ids)
    assert set(shipped("text")) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, ONLY_SPACES_MATTER),
        ({"model_type": "unigram", "bos_id": 0, "eos_id": 1, "unk_id": 2}, ONLY_SPACES_MATTER),
        ({"byte_fallback": True}, ONLY_SPACES_MATTER),
        ({"normalization_rule_name": "identity"}, [*TEXTS, " \u2581 a \u2581 \u2581 "]),
        ({"normalization_rule_name": "identity", "add_dummy_prefix": False}, [*TEXTS, " \u2581 a \u2581 \u2581 "]),
        (LIKE_LLAMA, TEXTS),
        ({**LIKE_LLAMA, "model_type": "unigram", "vocab_size": 700}, TEXTS),
        ({**LIKE_LLAMA, "model_type": "unigram", "vocab_size": 700, "add_dummy_prefix": False}, TEXTS),
        (
            {
                **LIKE_LLAMA,
                "add_dummy_prefix": False,
                "user_defined_symbols": ["<sep>", "\n"],
                "control_symbols": ["<ctl>"],
                "pad_id": 3,
            },
            [*TEXTS, "one<sep>two\n\n<sep>", "<ctl>"],
        ),
    ],
    ids=["bpe", "unigram", "bytes", "as-it-is", "no-prefix", "llama", "unigram-llama", "unigram-lossless", "symbols"],
)
def test_tokenizers_of_other_kinds(options: dict[str, Any], texts: list[str], tmp_path: Path) -> None:
    model = trained(tmp_path / "tokenizer.model", **options)
    ours, theirs = SPTokenizer(model), load(model, tmp_path)
    for text in texts:
        assert_same_ids(theirs, ours, text)
        if options.get("byte_fallback"):  # without bytes, what is unknown is shown in other ways
            assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model_type": "char", "vocab_size": 60}, "splits text into words or characters; only BPE and unigram"),
        ({"treat_whitespace_as_suffix": True}, "treats a space as the end of a word; only one at its beginning"),
        ({"user_defined_symbols": ["<sep>"]}, "has the user-defined symbol '<sep>', which can be exported only from"),
        (
            {"user_defined_symbols": ["<sep>"], "model_type": "unigram", "add_dummy_prefix": False, "vocab_size": 60},
            "has the user-defined symbol '<sep>', which can be exported only from BPE",
        ),
    ],
)
def test_what_cannot_be_reproduced_is_refused(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    model = trained(tmp_path / "other.model", **options)
    with pytest.raises(InputError) as error:
        as_tokenizer_json(model)
    assert str(error.value).startswith(f"{model}: {sentence}")
