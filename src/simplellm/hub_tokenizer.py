"""A tokenizer.json of Hugging Face's `tokenizers` library, with the interface of a SentencePiece model.

Newer models, such as Llama 3 and SmolLM2, have no other tokenizer. The file does not say which tokens begin and end a
document; other files in a model's folder do. `standalone` adds these tokens to the file, under a key of the lab's, so
that a checkpoint needs only this file.
"""

import json
import os
from pathlib import Path
from typing import Any

from simplellm.errors import require_package

KEY = "lab"  # in the file, next to the library's keys; the library does not accept it
SPECIAL = ("bos", "eos", "pad")


class HubTokenizer:
    """The methods of a SentencePiece model that `SPTokenizer` uses.

    Args:
        content: content of the file, which `standalone` may have written.
        folder: folder of the model, for a file that `standalone` has not written.

    Raises:
        InputError: the library `tokenizers` is not installed.
        ValueError: the file is not a tokenizer.
    """

    def __init__(self, content: bytes, folder: Path) -> None:
        require_package("tokenizers", "a tokenizer.json", "tokenizer")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns in ranks that are forks
        from tokenizers import Tokenizer, __version__

        self.version: str = __version__
        fields = json.loads(content)
        if not isinstance(fields, dict) or "model" not in fields:
            raise ValueError("it is not a tokenizer.json")
        added = fields.pop(KEY, None)
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(fields))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(str(error)) from error
        self._tokenizer.encode_special_tokens = True  # "</s>" in a text is four characters like any others
        self.pieces = self._tokenizer.get_vocab_size()
        self.added = special_ids(folder, self._tokenizer.token_to_id) if added is None else added

    def vocab_size(self) -> int:
        return int(self.added.get("vocab_size", self.pieces))

    def bos_id(self) -> int:
        return int(self.added["bos"])

    def eos_id(self) -> int:
        return int(self.added["eos"])

    def pad_id(self) -> int:
        return int(self.added["pad"])

    def unk_id(self) -> int:
        return -1  # the file names such a token if there is one

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def id_to_piece(self, id: int) -> str:
        return str(self._tokenizer.id_to_token(id))


def special_ids(folder: Path, id_of: Any) -> dict[str, int]:
    """Return the tokens of beginning, end and padding according to the files of a model's folder; -1 for none.

    `id_of` is the function from a token's text to its id. A padding token that has a second meaning counts as none.
    """
    named, config = (_fields_of(folder / name) for name in ("tokenizer_config.json", "config.json"))
    found: dict[str, int] = {}
    for name in SPECIAL:
        token, id = named.get(f"{name}_token"), config.get(f"{name}_token_id")
        text = token.get("content") if isinstance(token, dict) else token
        known = id_of(text) if isinstance(text, str) else None
        id = id[0] if isinstance(id, list) and id else id
        chosen = id if known is None else known
        found[name] = chosen if isinstance(chosen, int) and chosen >= 0 else -1
    return found | ({"pad": -1} if found["pad"] in (found["bos"], found["eos"]) else {})


def standalone(content: bytes, folder: Path, vocab_size: int) -> bytes:
    """Return a tokenizer.json that names its special tokens and the size of the vocabulary, which may be padded."""
    added = HubTokenizer(content, folder).added | {"vocab_size": vocab_size}
    return json.dumps({KEY: added, **json.loads(content)}, ensure_ascii=False).encode()


def original(content: bytes) -> dict[str, Any]:
    """Return the fields of a tokenizer.json without the additions of `standalone`."""
    fields: dict[str, Any] = json.loads(content)
    fields.pop(KEY, None)
    return fields


def _fields_of(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
