"""Film reviews with labels, from IMDb on the hub or generated; divided among the replicas of a model."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from reviews import review
from torch import Tensor

from simplellm.errors import InputError
from simplellm.tokenizers import SPTokenizer

HUB_REPOSITORY = "stanfordnlp/imdb"  # Maas et al., "Learning word vectors for sentiment analysis", ACL 2011
HUB_SPLITS = {"train": "train", "validation": "test"}


@dataclass
class Batch:
    """A batch of reviews, padded at the end to the length of the longest review of the whole batch.

    Attributes:
        tokens: (rows, seq), ids; each review starts with the beginning-of-document id, where the model classifies.
        is_padding: (rows, seq), true after the end of a review.
        labels: (rows,), 1 for positive and 0 for negative.
    """

    tokens: Tensor
    is_padding: Tensor
    labels: Tensor

    def rows_of(self, replica: int, replicas: int) -> "Batch":
        """Return one replica's rows: consecutive ones, divided as evenly as possible."""
        parts = (x.tensor_split(replicas)[replica] for x in (self.tokens, self.is_padding, self.labels))
        return Batch(*parts)

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.tokens.to(device), self.is_padding.to(device), self.labels.to(device))


class Reviews:
    """One split of the reviews as token ids, the same on every rank.

    Args:
        data: "sample" for the generator, "imdb" for the hub's data set, or a folder with one like it.
        split: "train" or "validation", of which IMDb calls the latter "test".
        samples: number of reviews; all of them if there are fewer.
        tokenizer: encodes the texts.
        seq_len: longer reviews are truncated.
        seed: seed of the generator, and of the choice of the hub's reviews.

    Raises:
        InputError: the data set cannot be read.
    """

    def __init__(
        self, data: str, split: str, samples: int, tokenizer: SPTokenizer, seq_len: int = 128, seed: int = 0
    ) -> None:
        if data == "sample":
            texts = [review(index, seed, split) for index in range(samples)]
        else:
            texts = read_hub(HUB_REPOSITORY if data == "imdb" else data, split, samples, seed)
        self.ids = [torch.tensor([tokenizer.bos_id, *tokenizer.encode(text)][:seq_len]) for text, _ in texts]
        self.labels = torch.tensor([label for _, label in texts])
        self._pad_id = tokenizer.pad_id

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Tensor) -> Batch:
        """Return the reviews of these numbers, (rows,)."""
        ids = [self.ids[row] for row in rows.tolist()]
        tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=self._pad_id)
        lengths = torch.tensor([len(review_ids) for review_ids in ids])
        return Batch(tokens, torch.arange(tokens.shape[1]) >= lengths[:, None], self.labels[rows])

    def evaluation_batches(self, batch_size: int, replica: int, replicas: int) -> Iterator[Batch]:
        """Yield one replica's part of the reviews; each review is in exactly one; the last batch may be smaller."""
        for rows in torch.arange(len(self)).tensor_split(replicas)[replica].split(batch_size):
            if len(rows):
                yield self.batch(rows)


def read_hub(repository: str, split: str, samples: int, seed: int) -> list[tuple[str, int]]:
    """Return shuffled texts and labels of a data set on the hub, or of a copy in a folder (IMDb is sorted by label)."""
    from datasets import load_dataset  # takes seconds, so only where needed

    try:
        rows = load_dataset(repository, split=HUB_SPLITS[split]).shuffle(seed=seed % 2**32)
        rows = rows.select(range(min(samples, len(rows))))
        return list(zip(rows["text"], rows["label"], strict=True))
    except Exception as error:  # of many kinds, from several libraries
        why = str(error).strip().partition("\n")[0][:150] or type(error).__name__
        raise InputError(
            f"--data: the reviews of {repository} cannot be read ({why}); give sample, or a folder with a copy "
            "of it: the splits train and test, the columns text and label"
        ) from error
