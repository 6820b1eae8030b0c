"""A long document is encoded part by part, as it is used: the same ids, with every kind of SentencePiece model."""

import time
from pathlib import Path
from typing import Any

import pytest
from support.small_tokenizers import trained

from simplellm.dataloaders import TinyStories
from simplellm.stories import story
from simplellm.tokenizers import PART_CHARACTERS, SPTokenizer

TEXT = " ".join(story(number, 0, "train").replace("\n", " ") for number in range(220))
MODELS: dict[str, dict[str, Any]] = {  # and those that go across spaces, or lose them: their texts stay whole
    "unigram": {},
    "bpe": {"model_type": "bpe", "remove_extra_whitespaces": False},
    "suffix": {"treat_whitespace_as_suffix": True},
    "stripped": {"add_dummy_prefix": False},
    "phrases": {"split_by_whitespace": False},
    "user": {"user_defined_symbols": ["  ", "the\u2581dog"]},
    "spaces": {"user_defined_symbols": ["\u2581\u2581\u2581"], "remove_extra_whitespaces": False},
}


def train(path: Path, **options: Any) -> SPTokenizer:
    lines = iter(TEXT[:60_000].replace(". ", ".\n").splitlines())
    few = {"vocab_size": 300, "hard_vocab_limit": False}
    return SPTokenizer(trained(path, **{"model_type": "unigram", "sentence_iterator": lines, **few, **options}))


@pytest.mark.parametrize("name", ["shipped", *MODELS])
def test_parts_have_the_ids_of_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SPTokenizer() if name == "shipped" else train(tmp_path / "own.model", **MODELS[name])
    for text in (TEXT, TEXT.replace(" ", "  "), TEXT.replace("the", "the \u2581 \u00e9 \t"), "x" * len(TEXT), ""):
        in_parts = tokenizer.encode(text)
        with monkeypatch.context() as uncut:
            uncut.setattr("simplellm.tokenizers.PART_CHARACTERS", len(text))
            assert tokenizer.encode(text) == in_parts
    _, end = tokenizer.encode_part(TEXT)
    assert (end < len(TEXT)) == (name in ("shipped", "unigram", "bpe", "spaces"))


def test_a_run_goes_on_within_a_long_document(tmp_path: Path) -> None:
    assert len(TEXT) > 3 * PART_CHARACTERS
    data = tmp_path / "long.txt"
    data.write_text(TEXT)
    ids = [*SPTokenizer().encode(TEXT), SPTokenizer().eos_id]
    batches = TinyStories(SPTokenizer(), 32, 512, data=str(data))
    for step in range(2 * len(ids) // 16384):  # the document comes again and again
        position = batches.state_dict()
        assert position["document"] == step * 16384 // len(ids)
        assert position["offset"] == step * 16384 % len(ids)
        batch = next(batches).flatten().tolist()
        assert batch == [ids[at % len(ids)] for at in range(step * 16384, (step + 1) * 16384)]
        resumed = TinyStories(SPTokenizer(), 32, 512, data=str(data))
        resumed.load_state_dict(position)
        assert next(resumed).flatten().tolist() == batch


def test_the_first_batch_of_a_long_document_comes_at_once(tmp_path: Path) -> None:
    data = tmp_path / "long.txt"
    data.write_text((TEXT + " ") * (8 * 2**20 // len(TEXT)))
    tokenizer, begun = SPTokenizer(), time.process_time()
    next(TinyStories(tokenizer, 1, 64, data=str(data)))
    first = time.process_time() - begun
    begun = time.process_time()
    tokenizer.encode(data.read_text()[: 2**21])
    assert first < time.process_time() - begun, "a quarter of the text takes longer"
