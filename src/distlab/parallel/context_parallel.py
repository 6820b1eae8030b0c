"""Context parallelism: ranks share each sequence, and each holds some of its positions.

Everything outside of attention needs only a rank's own positions. In attention, queries need the keys and values of all
earlier positions, which other ranks hold. There are three ways:

    gather   every rank collects all keys and values (Llama 3: arXiv 2407.21783, section 3.3.2)
    ring     they travel around the ranks, block by block (Liu et al., "Ring Attention", arXiv 2310.01889)
    heads    all-to-all: each rank gets all positions of some heads (DeepSpeed Ulysses: arXiv 2309.14509)

Position s attends to s + 1 keys, so with contiguous parts the last rank has the most work. Zigzag: the sequence is cut
into twice as many chunks as there are ranks, and rank r takes the chunks r and 2 * ranks - 1 - r.

Gradients of weights are averaged over these ranks as over replicas: each rank computes the loss of its own predictions,
scaled so that the mean over the ranks is the loss of the whole sequences.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distlab.axes.grid import Axis
from distlab.comm.group import all_gather_single, reduce_scatter_single
from distlab.comm.names import named
from distlab.parallel.options import CPKind, CPOrder, padded_length
from distlab.parallel.ring_attention import KeyBlock, Ring, ring_attention
from distlab.parallel.tp_group import linear_map
from distlab.parallel.vocabulary import vocabulary_parallel_next_token_loss
from simplellm.attention import Attend, SequencePart, attend_to_earlier, attend_with
from simplellm.documents import document_ids, positions_in_documents, within_documents
from simplellm.losses import next_token_loss

PADDING = -1  # in place of a document's number


@dataclass(frozen=True)
class Part:
    """A rank's part of a batch of sequences.

    Attributes:
        ids: the token ids (batch, positions of this rank).
        sequence: their positions and their attention, for the model.
        next_tokens: the token that each position predicts, (batch, positions).
        ignored: the positions that predict nothing, (batch, positions), bool; None for the last one.
        predictions: number of predictions of a whole batch, divided by the ranks; None: the number of those here.
    """

    ids: Tensor
    sequence: SequencePart
    next_tokens: Tensor
    ignored: Tensor | None
    predictions: float | None

    def loss(self, logits: Tensor) -> Tensor:
        """Return this rank's share of the loss, from its logits (batch, positions, vocab): a scalar.

        The mean over the ranks is the loss of the whole batch.
        """
        return next_token_loss(logits, self.next_tokens, self.ignored, self.predictions)


def loss_of_part(logits: Tensor, part: Part, vocab_size: int, axis: Axis) -> Tensor:
    """Return `Part.loss` of logits whose vocabulary, `vocab_size` wide, is divided among the ranks along an axis."""
    return vocabulary_parallel_next_token_loss(
        logits, part.next_tokens, vocab_size, axis, part.ignored, part.predictions
    )


@dataclass(frozen=True)
class ContextParallel:
    """The way in which the ranks along an axis share sequences.

    Attributes:
        axis: the ranks, which all have the same sequences.
        kind: how queries get the keys and values of other ranks.
        order: which positions each rank holds.
        document_end: the token that ends a document; tokens attend within their document. None: no such limit.
    """

    axis: Axis
    kind: CPKind = "ring"
    order: CPOrder = "zigzag"
    document_end: int | None = None

    def part(self, ids: Tensor) -> Part:
        """Return this rank's part of sequences, token ids (batch, seq) of any length from 2.

        Where the ranks cannot divide them evenly, the last chunks are padded; nothing attends to the padding.
        """
        batch, seq = ids.shape
        if self.axis.size == 1:
            usual = SequencePart(torch.arange(seq, device=ids.device), attend_to_earlier)
            masked = None if self.document_end is None else within_documents(ids, self.document_end)
            return Part(ids, masked or usual, ids.roll(-1, dims=1), None, None)
        by_rank, documents = self._places(ids)
        positions, last = by_rank[self.axis.rank], seq - 1
        places = positions.clamp(max=last)  # padding looks like the last token
        rotary = places if documents is None else positions_in_documents(documents)[:, places]
        return Part(
            ids[:, places],
            SequencePart(rotary, self._attend(by_rank, documents)),
            ids[:, (positions + 1).clamp(max=last)],
            (positions >= last).expand(batch, -1),
            batch * last / self.axis.size,
        )

    def ring(self, ids: Tensor) -> Ring:
        """Return the ring for sequences, token ids (batch, seq)."""
        return Ring(self.axis, self._blocks(*self._places(ids)))

    def _places(self, ids: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Return the positions of each rank, (positions,) each, and the document of each position, (batch, seq).

        Both are padded; None in place of documents that do not matter.
        """
        seq, ranks = ids.shape[1], self.axis.size
        padded = padded_length(seq, ranks, self.order)
        by_rank = [positions_of(rank, ranks, padded, self.order).to(ids.device) for rank in range(ranks)]
        if self.document_end is None:
            return by_rank, None
        documents = document_ids(ids, self.document_end)
        return by_rank, F.pad(documents, (0, padded - seq), value=PADDING)

    def _attend(self, by_rank: list[Tensor], documents: Tensor | None) -> Attend:
        """Return the attention of this rank's positions; the arguments are the results of `_places`."""
        if self.kind == "ring":
            return partial(ring_attention, ring=Ring(self.axis, self._blocks(by_rank, documents)))
        if self.kind == "gather":
            keys, queries = torch.cat(by_rank), by_rank[self.axis.rank]
            return partial(_gathering, axis=self.axis, attend=attend_with(_mask(queries, keys, documents)))
        order = torch.cat(by_rank).argsort()
        whole = torch.arange(len(order), device=order.device)
        attend = attend_to_earlier if documents is None else attend_with(_mask(whole, whole, documents))
        return partial(_exchanging_heads, axis=self.axis, order=order, attend=attend)

    def _blocks(self, by_rank: list[Tensor], documents: Tensor | None) -> list[KeyBlock]:
        """Return this rank's work for the keys of each source, in the order in which they arrive."""
        own, ranks, blocks = self.axis.rank, self.axis.size, []
        for turn in range(ranks):
            source = (own - turn) % ranks
            seen = visible(own, source, len(by_rank[own]), self.order)
            if seen is None:
                blocks.append(KeyBlock(source, None))
                continue
            queries, keys = seen
            mask: Tensor | Literal["causal"] | None = "causal" if source == own else None
            if documents is not None:
                mask = _mask(by_rank[own][queries], by_rank[source][keys], documents)
            if isinstance(mask, Tensor) and not mask.any():
                blocks.append(KeyBlock(source, None))
            else:
                blocks.append(KeyBlock(source, seen, mask))
        return blocks


def positions_of(rank: int, ranks: int, seq: int, order: CPOrder) -> Tensor:
    """Return the positions of a rank, ascending; `seq` is divisible by `ranks`, with "zigzag" by twice as many."""
    if order == "contiguous":
        return torch.arange(seq).chunk(ranks)[rank]
    chunks = torch.arange(seq).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def visible(own: int, source: int, length: int, order: CPOrder) -> tuple[slice, slice] | None:
    """Return a rank's queries that attend to keys of a source, and these keys, of `length` each; None if none do.

    With zigzag chunks, all queries see a lower rank's first half, and the second half of the queries sees all keys of a
    higher rank: the same work in each step, for each rank.
    """
    everything, half = slice(None), length // 2
    if source == own:
        return everything, everything
    if order == "contiguous":
        return (everything, everything) if source < own else None
    return (everything, slice(half)) if source < own else (slice(half, None), everything)


def _mask(queries: Tensor, keys: Tensor, documents: Tensor | None) -> Tensor:
    """Return the mask of the keys to which each query attends: (batch or 1, 1, queries, keys), bool."""
    mask = (keys <= queries.unsqueeze(-1)).expand(1, 1, -1, -1)
    if documents is not None:
        is_same = documents[:, queries].unsqueeze(-1) == documents[:, keys].unsqueeze(-2)
        mask = mask & is_same.unsqueeze(1)
    return mask


def _gathering(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """Compute attention to the keys and values of all ranks, which every rank collects; their gradients go back."""
    own = torch.stack([k, v])  # (2, batch, key heads, positions, head_dim)

    def gather(own: Tensor) -> Tensor:
        gathered = own.new_empty(axis.size, *own.shape)
        with named("the keys and values", "keys and values"):
            all_gather_single(gathered, own.contiguous(), axis.group)
        return gathered

    def scatter(grad: Tensor) -> Tensor:
        own = grad.new_empty(grad.shape[1:])
        with named("the gradients of keys and values", "gradients of keys and values"):
            reduce_scatter_single(own, grad.contiguous(), group=axis.group)
        return own

    gathered = linear_map(own, gather, scatter)
    k, v = torch.cat(gathered.unbind(), dim=-2)
    return attend(q, k, v)


def _exchanging_heads(q: Tensor, k: Tensor, v: Tensor, axis: Axis, order: Tensor, attend: Attend) -> Tensor:
    """Compute attention after an exchange of this rank's positions with all heads for all positions with some heads.

    Args:
        order: for each position of the sequence, its index in the concatenated positions of all ranks.
    """
    heads, key_heads, ranks = q.shape[1], k.shape[1], axis.size
    if heads % ranks:
        raise ValueError(f"{ranks} ranks cannot exchange {heads} heads: each needs as many as the others")
    if key_heads % ranks:  # repeat them until they can be divided
        k, v = (part.repeat_interleave(heads // key_heads, dim=1) for part in (k, v))

    def to_heads(x: Tensor) -> Tensor:  # (batch, heads, positions, head_dim) -> (batch, heads / ranks, seq, head_dim)
        parts = _all_to_all(x.unflatten(1, (ranks, -1)).movedim(1, 0), axis)
        return torch.cat(parts.unbind(), dim=-2)[..., order, :]

    def to_positions(x: Tensor) -> Tensor:  # the inverse, and so also the transposed map
        in_ranks = torch.empty_like(x)
        in_ranks[..., order, :] = x
        parts = _all_to_all(torch.stack(in_ranks.chunk(ranks, dim=-2)), axis)
        return torch.cat(parts.unbind(), dim=1)

    q, k, v = (linear_map(part, to_heads, to_positions) for part in (q, k, v))
    return linear_map(attend(q, k, v), to_positions, to_heads)


def _all_to_all(parts: Tensor, axis: Axis) -> Tensor:
    """Send part r of `parts`, (ranks, …), to rank r; return the parts that all ranks sent to this one, same shape."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    with named("the heads", "heads"):
        dist.all_to_all_single(received, parts, group=axis.group)
    return received
