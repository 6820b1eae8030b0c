"""An embedding and a loss that are sharded over the vocabulary, so that no rank holds the logits of all tokens."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ReduceOp

from distlab.axes.grid import Axis, all_ranks
from distlab.parallel.tp_group import FORWARD, VOCABULARY, TPGroup
from simplellm.errors import require
from simplellm.losses import causalLLMLoss, next_token_loss


def own_rows(ids: Tensor, vocab_size: int, tp_group: TPGroup) -> tuple[Tensor, Tensor]:
    """Return the rows of the tokens `ids` (any shape) in this rank's shard, and a mask of other shards' tokens.

    Masked tokens get row 0. A token outside the vocabulary gets a row that no shard has, so that torch fails on all
    ranks as it would in the whole model: on the CPU with an exception; on CUDA in the kernel, since checking the ids
    first would synchronize.
    """
    first, end = tp_group.own_range(vocab_size)
    elsewhere = ((ids >= 0) & (ids < first)) | ((ids >= end) & (ids < vocab_size))
    return (ids - first).masked_fill(elsewhere, 0), elsewhere


class VocabularyParallelEmbedding(nn.Embedding):
    """A shard of an embedding: zero for tokens of other ranks' shards, so that the ranks' results can be added up."""

    def __init__(self, whole: nn.Embedding, tp_group: TPGroup) -> None:
        self.vocab_size, self.tp_group = whole.num_embeddings, tp_group
        first, end = tp_group.own_range(self.vocab_size)
        padding_idx = whole.padding_idx
        if padding_idx is not None:
            padding_idx = padding_idx - first if first <= padding_idx < end else None
        super().__init__(end - first, whole.embedding_dim, padding_idx, _weight=whole.weight.detach()[first:end])
        self.weight = tp_group.own_parameter(whole.weight, dim=0)

    def forward(self, ids: Tensor) -> Tensor:
        """Return this rank's term of the embeddings (batch, seq, dmodel) of token ids (batch, seq).

        Raises:
            IndexError: a token is outside the vocabulary, on the CPU; see `own_rows`.
        """
        rows, elsewhere = own_rows(ids, self.vocab_size, self.tp_group)
        return super().forward(rows).masked_fill(elsewhere.unsqueeze(-1), 0)


def vocabulary_parallel_loss(logits: Tensor, target: Tensor, vocab_size: int, axis: Axis | None = None) -> Tensor:
    """Return `causalLLMLoss` of logits that are sharded over the vocabulary; the same result on every rank.

    The ranks exchange three numbers per token in the forward pass, and nothing in the backward pass.

    `logits` are (batch, seq, this rank's shard of `vocab_size`), in any floating dtype; `target` is (batch, seq),
    int64. Raises `InputError` if the sequences are too short; for tokens outside the vocabulary see `own_rows`.
    """
    seq = target.shape[1]
    require(seq >= 2, f"--seq-len {seq} leaves no token to predict: it must be at least 2")
    axis = axis or all_ranks("tp")
    if axis.size == 1:
        return causalLLMLoss(logits, target, vocab_size)
    tp_group = TPGroup("the loss", VOCABULARY, axis)
    next_token = target.to(logits.device).roll(-1, dims=1).unsqueeze(-1)  # the last position has none: it is ignored
    return _VocabularyParallelLoss.apply(_wide(logits), *own_rows(next_token, vocab_size, tp_group), tp_group)


def vocabulary_parallel_next_token_loss(
    logits: Tensor,
    next_tokens: Tensor,
    vocab_size: int,
    axis: Axis,
    ignored: Tensor | None = None,
    predictions: float | None = None,
) -> Tensor:
    """Return `next_token_loss`, in the same way: its `next_tokens`, `ignored` and `predictions`."""
    if axis.size == 1:
        return next_token_loss(logits, next_tokens, ignored, predictions)
    tp_group = TPGroup("the loss", VOCABULARY, axis)
    rows, elsewhere = own_rows(next_tokens.to(logits.device).unsqueeze(-1), vocab_size, tp_group)
    return _VocabularyParallelLoss.apply(_wide(logits), rows, elsewhere, tp_group, ignored, predictions)


class _VocabularyParallelLoss(torch.autograd.Function):
    """Cross-entropy is log(sum of exp(logits)) - the logit of the next token: a maximum and two sums over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        next_token: Tensor,
        elsewhere: Tensor,
        tp_group: TPGroup,
        ignored: Tensor | None = None,
        predictions: float | None = None,
    ) -> Tensor:
        greatest = tp_group.all_reduce(logits.amax(-1, keepdim=True), FORWARD, ReduceOp.MAX)
        shifted = logits - greatest  # no logit is above 0, so that exp() cannot overflow
        own_logit = shifted.gather(-1, next_token).masked_fill(elsewhere, 0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1, keepdim=True), own_logit])
        total, logit = tp_group.all_reduce(sums, FORWARD)
        ctx.save_for_backward(exponentials, total, next_token, elsewhere)
        ctx.ignored, ctx.predictions = ignored, predictions or next_token[:, 1:].numel()
        losses = (total.log() - logit).squeeze(-1)
        losses = losses[:, :-1] if ignored is None else losses.masked_fill(ignored, 0)
        return losses.sum() / ctx.predictions

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        exponentials, total, next_token, elsewhere = ctx.saved_tensors
        grad = exponentials / total
        grad.scatter_add_(-1, next_token, -(~elsewhere).to(grad.dtype))  # softmax - one_hot, this rank's shard of both
        if ctx.ignored is None:
            grad[:, -1] = 0
        else:
            grad.masked_fill_(ctx.ignored.unsqueeze(-1), 0)
        return grad.mul_(grad_loss / ctx.predictions), None, None, None, None, None


def _wide(logits: Tensor) -> Tensor:
    """Return logits in at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
