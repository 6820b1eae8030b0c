"""Attention within the documents that were joined to one sequence."""

import torch
from torch import Tensor

from simplellm.attention import SequencePart, attend_with


def document_ids(ids: Tensor, end: int) -> Tensor:
    """Return the number of each token's document in its sequence, (batch, seq); each document's last token is `end`."""
    ends = (ids == end).long()
    return ends.cumsum(-1) - ends


def positions_in_documents(documents: Tensor) -> Tensor:
    """Return the position of each token in its document, (batch, seq), from the documents' numbers."""
    places = torch.arange(documents.shape[-1], device=documents.device).expand_as(documents)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - places.masked_fill(~is_first, 0).cummax(-1).values


def within_documents(ids: Tensor, end: int) -> SequencePart:
    """Return sequences whose tokens attend only within their documents, and whose positions restart with each document.

    The first token of a document is still predicted, from the `end` before it, as without a mask.

    Args:
        ids: token ids (batch, seq), which begin anywhere in a document.
        end: the token that ends a document.
    """
    documents = document_ids(ids, end)
    is_same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    mask = is_same.tril().unsqueeze(1)  # (batch, 1, queries, keys)
    return SequencePart(positions_in_documents(documents), attend_with(mask))
