"""Stories as batches of token ids.

All layouts follow one rule. The documents, each followed by an end-of-document token, form one endless stream of
tokens, which is cut into sequences. With G sequences per step (over all replicas), step s trains on the sequences s*G
to s*G + G - 1, however the replicas share them. So three replicas with two sequences each see, step by step, the
same data as one replica with six: data is a function of (seed, step, row) only.
"""

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from simplellm.errors import InputError
from simplellm.sources import SPLITS, choose_source, open_source
from simplellm.tokenizers import SPTokenizer


class Tokenizer(Protocol):
    """The part of a tokenizer that the batches need."""

    eos_id: int

    def encode(self, text: str) -> list[int]: ...


class TinyStories:
    """An endless iterator over batches of stories: int64 token ids of shape (batch, seq).

    Its only state is its position; `iter` continues from there.

    Args:
        tokenizer: encodes the documents; its `eos_id` separates them.
        batch_size: sequences per step for this replica.
        seq_l: tokens per sequence.
        skip: number of documents to skip at the beginning.
        split: "train" or "validation", which share no document.
        data: "sample" (the generator), "tinystories" (the hub's data set), the path of a .txt, .jsonl or .parquet file,
            or "auto" (see `choose_source`). Documents of a .txt file are separated by "<|endoftext|>" or, if no line
            begins or ends with it, by blank lines; .jsonl has one per line, .parquet one per row, under the name
            "text".
        seed: the generator's seed; other sources have a fixed order.
        rank: the number of this replica.
        num_replicas: replicas that share each step; each of them reads the whole stream and keeps its own rows.
        revision: revision of the hub's data set; by default the newest in the local cache, if any, else the newest.

    Raises:
        InputError: an argument is out of its range, or the data cannot be read.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        batch_size: int = 1,
        seq_l: int = 256,
        skip: int = 0,
        split: str = "train",
        *,
        data: str = "auto",
        seed: int = 0,
        rank: int = 0,
        num_replicas: int = 1,
        revision: str | None = None,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size {batch_size}: a batch needs at least 1 sequence")
        if seq_l < 2:
            raise InputError(f"seq_l {seq_l}: a sequence needs at least 2 tokens, one to read and one to predict")
        if skip < 0:
            raise InputError(f"skip={skip}: documents to skip are 0 or more")
        if num_replicas < 1:
            raise InputError(f"num_replicas={num_replicas}: there is at least 1 replica")
        if not 0 <= rank < num_replicas:
            raise InputError(f"rank={rank}: a rank among {num_replicas} replicas is from 0 to {num_replicas - 1}")
        if split not in SPLITS:
            raise InputError(f'split="{split}": the splits are {" and ".join(SPLITS)}')
        if tokenizer.eos_id < 0:
            raise InputError("the tokenizer has no end-of-document piece (eos); give one that has")
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._seq_l = seq_l
        self._rank = rank
        self._num_replicas = num_replicas
        self._source = open_source(choose_source(data)[0], split, seed, revision)
        self._go_to(document=skip, offset=0)

    def __iter__(self) -> "TinyStories":
        return self

    def __next__(self) -> Tensor:
        rows, seq = self._batch_size, self._seq_l
        step_tokens = self._num_replicas * rows * seq
        while len(self._tokens) < step_tokens:
            self._read_on()
        first = self._rank * rows * seq
        batch = torch.tensor(self._tokens[first : first + rows * seq], dtype=torch.int64).view(rows, seq)

        del self._tokens[:step_tokens]
        self._offset += step_tokens
        while self._lengths and self._offset >= self._lengths[0] and (self._is_whole or len(self._lengths) > 1):
            self._offset -= self._lengths.popleft()
            self._document += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the position: the next token is number `offset` of document number `document`.

        It is the same on every rank and does not depend on layout or batch size, so a run may be resumed with others.
        """
        return {"document": self._document, "offset": self._offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position from `state_dict`.

        Raises:
            InputError: there is no such position in this data with this tokenizer.
        """
        self._go_to(state["document"], state["offset"])

    def _go_to(self, document: int, offset: int) -> None:
        self._documents = self._source.documents(document)
        self._document = document  # the document of the first token in the buffer
        self._offset = offset  # number of its tokens that have been used
        self._tokens: list[int] = []  # tokens that have been read but not used
        self._lengths: deque[int] = deque()  # tokens of the documents in the buffer, including used ones
        self._is_whole = True  # whether all of the last of these documents has been encoded
        self._read_on()  # now, so that invalid data ends the run before ranks wait for each other
        while offset >= len(self._tokens) and not self._is_whole:
            self._read_on()
        if offset >= len(self._tokens):
            raise InputError(
                f"token {offset} of document {document} does not exist ({len(self._tokens)} tokens); "
                "go on with the data and the tokenizer that the position is from"
            )
        del self._tokens[:offset]

    def _read_on(self) -> None:
        """Encode the next part of the last document in the buffer, or the first part of the next document."""
        if self._is_whole:
            text, self._is_whole = next(self._documents), False
            if isinstance(self._tokenizer, SPTokenizer):
                self._parts = self._tokenizer.encode_in_parts(text)
            else:
                self._parts = iter([self._tokenizer.encode(text)])
            self._lengths.append(0)
        part = next(self._parts, None)
        if part is None:
            self._is_whole, part = True, [self._tokenizer.eos_id]
        self._tokens += part
        self._lengths[-1] += len(part)
