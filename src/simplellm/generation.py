"""Helpers for text generation: the tokens of a prompt, and text from tokens that arrive one by one."""

from simplellm.errors import InputError, require_text
from simplellm.tokenizers import SPTokenizer


def prompt_ids(prompt: str, tokenizer: SPTokenizer, ctx_size: int) -> list[int]:
    """Return the prompt's tokens; for an empty prompt, the end of a document, after which the next one begins.

    Raises:
        InputError: there are none, or too many for the model to continue them.
    """
    require_text(prompt, "prompt")
    ids = tokenizer.encode(prompt) or [id for id in (tokenizer.eos_id, tokenizer.bos_id) if id >= 0][:1]
    if not ids:
        sentence = "prompt is empty, and the tokenizer marks no end of a document: give at least a word"
        raise InputError(sentence, "prompt")
    if len(ids) >= ctx_size:
        raise InputError(
            f"prompt is of {len(ids)} tokens: the model reads {ctx_size} at most, story included; give a shorter one",
            "prompt",
        )
    return ids


class TextStream:
    """The text of tokens as they arrive: its pieces, joined, are the text of all tokens together.

    A token alone does not determine its text: a character may take several tokens, a byte each, and some tokenizers
    drop the space at the beginning of a text. So the last tokens are decoded again with each new one, and the addition
    is the new text.
    """

    def __init__(self, tokenizer: SPTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the tokens of the last text that was returned, and the newer ones
        self._given = 0  # number of them that belong to that text

    def add(self, id: int) -> str:
        """Return the text that a token completes; "" in the middle of a character."""
        self._ids.append(id)
        before, now = self._tokenizer.decode(self._ids[: self._given]), self._tokenizer.decode(self._ids)
        if now.endswith("\ufffd") or len(now) <= len(before):  # U+FFFD replaces an incomplete character
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return now[len(before) :]

    def rest(self) -> str:
        """Return the end of the text so far that `add` has held back."""
        return self._tokenizer.decode(self._ids)[len(self._tokenizer.decode(self._ids[: self._given])) :]
