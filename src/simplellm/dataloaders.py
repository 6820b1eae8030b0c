"""Stories as batches of token ids.

All layouts follow one rule. The documents, each followed by an end-of-document token, form one endless stream of
tokens, which is cut into sequences. With G sequences per step (over all replicas), step s trains on the sequences s*G
to s*G + G - 1, however the replicas share them. So three replicas with two sequences each see, step by step, the
same data as one replica with six: data is a function of (seed, step, row) only.
"""

import numpy as np
import torch
from torch import Tensor

from simplellm.errors import require
from simplellm.sources import SPLITS, choose_source
from simplellm.token_chunks import TokenChunks, Tokenizer


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
        num_replicas: replicas that share each step; each of them takes its own rows of it.
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
        require(batch_size >= 1, f"batch_size {batch_size}: a batch needs at least 1 sequence")
        require(seq_l >= 2, f"seq_l {seq_l}: a sequence needs at least 2 tokens, one to read and one to predict")
        require(skip >= 0, f"skip={skip}: documents to skip are 0 or more")
        require(num_replicas >= 1, f"num_replicas={num_replicas}: there is at least 1 replica")
        ranks = f"a rank among {num_replicas} replicas is from 0 to {num_replicas - 1}"
        require(0 <= rank < num_replicas, f"rank={rank}: {ranks}")
        require(split in SPLITS, f'split="{split}": the splits are {" and ".join(SPLITS)}')
        require(tokenizer.eos_id >= 0, "the tokenizer has no end-of-document piece (eos); give one that has")
        self._batch_size = batch_size
        self._seq_l = seq_l
        self._rank = rank
        self._num_replicas = num_replicas
        self._tokens = TokenChunks(tokenizer, choose_source(data)[0], split, seed, revision)
        self._go_to(document=skip, offset=0)

    def __iter__(self) -> "TinyStories":
        return self

    def __next__(self) -> Tensor:
        tokens = self._batch_size * self._seq_l
        batch, filled = np.empty(tokens, np.int64), 0
        self._go_on(self._rank * tokens)  # those of the replicas before this one
        while filled < tokens:
            part = self._chunk.tokens(self._index, self._index + tokens - filled)
            batch[filled : filled + len(part)] = part
            filled += len(part)
            self._go_on(len(part))
        self._go_on((self._num_replicas - self._rank - 1) * tokens)  # those of the replicas after it
        return torch.from_numpy(batch).view(self._batch_size, self._seq_l)

    def state_dict(self) -> dict[str, int]:
        """Return the position: the next token is number `offset` of document number `document`.

        It is the same on every rank and does not depend on layout or batch size, so a run may be resumed with others.
        """
        document, offset = self._chunk.position(self._index)
        return {"document": self._passed + document, "offset": offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position from `state_dict`.

        Raises:
            InputError: there is no such position in this data with this tokenizer.
        """
        self._go_to(state["document"], state["offset"])

    def _go_to(self, document: int, offset: int) -> None:
        """Find the first chunk now, so that invalid data ends the run before ranks wait for each other."""
        self._following = self._tokens.walk(document, offset)
        # The number of documents in earlier passes through the data, and the chunk that the next token is in.
        self._passed, self._chunk = next(self._following)
        self._index = self._chunk.index_of(document - self._passed, offset)  # of that token

    def _go_on(self, tokens: int) -> None:
        """Go to a later token, and to the chunk that it is in."""
        self._index += tokens
        while self._index >= len(self._chunk):
            self._index -= len(self._chunk)
            self._passed, self._chunk = next(self._following)
