"""The tokenizer: its ids, other models than the shipped one, and what it says of a path that leads to no model."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sentencepiece import SentencePieceProcessor
from support.small_tokenizers import LIKE_LLAMA, TRICKY, trained

from simplellm.errors import InputError
from simplellm.hub_tokenizer import special_ids
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

SHIPPED = SPTokenizer()


def test_ids() -> None:
    assert (SHIPPED.vocab_size, SHIPPED.bos_id, SHIPPED.eos_id, SHIPPED.pad_id) == (4096, 1, 2, 3)
    assert SHIPPED.encode("") == []
    assert SHIPPED.decode([1, *SHIPPED.encode("the end"), 2, 3, 3]) == "the end"


def test_decode_takes_tensors_and_arrays() -> None:
    ids = SHIPPED.encode("Once upon a time")
    assert (
        SHIPPED.decode(torch.tensor(ids))
        == SHIPPED.decode(np.array(ids))
        == SHIPPED.decode(tuple(ids))
        == "Once upon a time"
    )


def test_the_shipped_model_is_small_and_carries_no_path() -> None:
    model = SHIPPED_MODEL.read_bytes()
    assert len(model) < 100_000
    assert not re.search(rb"/(home|root|tmp|usr|work|Users)\b|\.jsonl|\.txt", model)


@pytest.mark.parametrize("adds_space", [True, False])
def test_another_model_works_as_it_does_by_itself(adds_space: bool, tmp_path: Path) -> None:
    """One with SentencePiece's defaults: a space before the text, no bytes, no padding, white space run together."""
    path = trained(tmp_path / "other.model", vocab_size=500, add_dummy_prefix=adds_space)
    model = SentencePieceProcessor(model_file=str(path))
    tokenizer = SPTokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (500, -1, 1, 2)
    for text in TRICKY:
        assert tokenizer.encode(text) == model.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == model.decode(model.encode(text))
    assert tokenizer.decode(tokenizer.encode("one  two ")) == "one two"


def test_a_space_before_the_text_is_not_put_into_its_middle(tmp_path: Path) -> None:
    """As in Llama's model: it has bytes, but encoding the parts around U+2581 would add a space to each."""
    path = trained(tmp_path / "llama-like.model", **LIKE_LLAMA)
    model = SentencePieceProcessor(model_file=str(path))
    for text in TRICKY:
        assert SPTokenizer(path).encode(text) == model.encode(text)


HALF = pytest.param(SHIPPED_MODEL.read_bytes()[:30_000], id="half of one")


@pytest.mark.parametrize("content", [b"", b"{}", b"hello\n", b"\x00" * 100, b"\x08\x01", bytes(range(256)), HALF])
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "no.model"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        SPTokenizer(path)
    assert str(error.value) == (
        f"tokenizer {path}: is not a SentencePiece model; "
        "give the path of a SentencePiece model (.model), or leave it out for the shipped one"
    )


def test_special_tokens_have_texts() -> None:
    assert SHIPPED.special_pieces() == {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>"}


@pytest.mark.parametrize(
    ("named", "config", "ids"),
    [
        ({"bos_token": "<s>", "eos_token": {"content": "</s>"}}, {"bos_token_id": 7, "pad_token_id": 5}, (1, 2, 5)),
        ({"bos_token": "unknown"}, {"bos_token_id": 7, "eos_token_id": [8, 9]}, (7, 8, -1)),
        ({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<s>"}, {}, (1, 2, -1)),
        ({"eos_token": "</s>", "pad_token": "</s>"}, {"bos_token_id": []}, (-1, 2, -1)),
    ],
)
def test_special_tokens_are_those_that_files_beside_a_tokenizer_json_name(
    named: dict[str, object], config: dict[str, object], ids: tuple[int, ...], tmp_path: Path
) -> None:
    """By their text, else by their number; padding with a token that means something else is none."""
    for name, fields in (("tokenizer_config.json", named), ("config.json", config)):
        (tmp_path / name).write_text(json.dumps(fields))
    assert tuple(special_ids(tmp_path, {"<s>": 1, "</s>": 2}.get).values()) == ids


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[1]", b"{", b"\xff"])
def test_files_beside_a_tokenizer_json_that_hold_no_object_name_no_tokens(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    assert {*special_ids(tmp_path, {"<s>": 1}.get).values()} == {-1}


def test_a_path_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^tokenizer \S+/none\.model: there is no such file; give the path of a"):
        SPTokenizer(tmp_path / "none.model")
    with pytest.raises(InputError, match=r"^tokenizer \S+: cannot be read \(Is a directory\); give the path of a"):
        SPTokenizer(str(tmp_path))
    os.mkfifo(pipe := tmp_path / "pipe.model")
    for path in (pipe, "/dev/null"):  # as /dev/zero, from which reading would not end
        with pytest.raises(InputError, match=rf"^tokenizer {path}: is not a file; give the path of a"):
            SPTokenizer(path)
    if os.getuid():
        (tmp_path / "secret.model").touch(mode=0)
        with pytest.raises(InputError, match="Permission denied"):
            SPTokenizer(tmp_path / "secret.model")
