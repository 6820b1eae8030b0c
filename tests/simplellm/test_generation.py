"""Text out of tokens that come one by one, and models that have come to nothing."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_models import saved_model
from support.small_tokenizers import LIKE_LLAMA, trained

from simplellm.errors import InputError
from simplellm.generation import TextStream, prompt_ids
from simplellm.stories import story
from simplellm.tokenizers import SPTokenizer

pytestmark = pytest.mark.quick

SHIPPED = SPTokenizer()


@pytest.fixture(scope="module")
def llama_like(tmp_path_factory: pytest.TempPathFactory) -> SPTokenizer:
    """One that puts a space before a text, and takes it away again."""
    return SPTokenizer(trained(tmp_path_factory.mktemp("tokenizer") / "llama-like.model", **LIKE_LLAMA))


def pieces(tokenizer: SPTokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.add(id) for id in ids), stream.rest()]


def test_a_character_comes_when_its_last_byte_has_come() -> None:
    ids = SHIPPED.encode("é🐭!")
    assert len(ids) == 7
    assert pieces(SHIPPED, ids) == ["", "é", "", "", "", "🐭", "!", ""]


def test_what_is_no_character_comes_at_the_end() -> None:
    ids = SHIPPED.encode("a🐭")[:-1]
    assert pieces(SHIPPED, ids) == ["a", "", "", "", "\ufffd\ufffd\ufffd"]


def test_spaces_are_kept_but_for_the_first(llama_like: SPTokenizer) -> None:
    text = "Once upon a  time.\n The cat"
    given = pieces(llama_like, llama_like.encode(text))
    assert "".join(given) == text
    assert all(given[:-1])
    ids = [*llama_like.encode("Once"), llama_like.eos_id, *llama_like.encode("the cat")]
    assert "".join(pieces(llama_like, ids)) == "Once the cat", "also for the first after a token without text"


@settings(deadline=None, max_examples=200)
@given(data=st.data(), text=st.text(max_size=30))
def test_joined_it_is_the_text_of_all(llama_like: SPTokenizer, data: st.DataObject, text: str) -> None:
    for tokenizer in (SHIPPED, llama_like):
        ids = tokenizer.encode(text)
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
        any_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(1, 260), max_size=30))
        assert "".join(pieces(tokenizer, any_ids)) == tokenizer.decode(any_ids)


def test_the_prompt() -> None:
    assert prompt_ids("Once upon", SHIPPED, 10) == SHIPPED.encode("Once upon")
    assert prompt_ids("", SHIPPED, 10) == [SHIPPED.eos_id]
    ids = SHIPPED.encode(story(0))
    assert prompt_ids(story(0), SHIPPED, len(ids) + 1) == ids
    with pytest.raises(InputError) as error:
        prompt_ids(story(0), SHIPPED, len(ids))
    assert str(error.value) == (
        f"prompt is of {len(ids)} tokens: the model reads {len(ids)} at most, story included; give a shorter one"
    )
    with pytest.raises(InputError, match="prompt is not valid text in the terminal's encoding; give UTF-8"):
        prompt_ids("a\udcff", SHIPPED, 10)
    other: Any = SimpleNamespace(encode=lambda _: [], eos_id=-1, bos_id=5)  # without a token that ends documents
    assert prompt_ids("", other, 10) == [5]
    other.bos_id = -1
    with pytest.raises(InputError, match="prompt is empty, and the tokenizer marks no end of a document"):
        prompt_ids("", other, 10)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_model_that_has_diverged(value: float) -> None:
    saved = saved_model()
    assert (saved.after_steps, replace(saved, step=1200).after_steps) == ("", " after 1,200 steps")
    saved.parameters["model.norm.weight"][3] = value
    with pytest.raises(InputError) as error:
        saved.build()
    assert str(error.value) == "model.norm.weight is not finite: the run has diverged; give an earlier checkpoint"
