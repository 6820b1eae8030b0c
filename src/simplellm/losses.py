"""The loss of a causal language model."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from simplellm.compiled import PartToCompile, through_compiler
from simplellm.errors import InputError


def causalLLMLoss(logits: Tensor, target: Tensor, vocab_size: int) -> Tensor:
    """Return the mean cross-entropy, in nats, of each token given the tokens before it.

    The function does the shift: position t of `logits` predicts token t + 1 of `target`, so `target` is the same tensor
    as the model's input.

    Args:
        logits: (batch, seq, vocab), in any floating dtype; the loss is computed in float32.
        target: (batch, seq), int64, on any device.
        vocab_size: the size of the vocabulary, the last dimension of `logits`.

    Returns:
        A float32 scalar: the mean over the batch * (seq - 1) predictions.

    Raises:
        InputError: the sequences are too short to predict anything.
    """
    batch, seq = target.shape
    if seq < 2:
        raise InputError(f"a sequence of length {seq} has no token to predict: it must be at least 2")
    return next_token_loss(logits.reshape(batch, seq, vocab_size), target.roll(-1, dims=1))


def next_token_loss(
    logits: Tensor, next_tokens: Tensor, ignored: Tensor | None = None, predictions: float | None = None
) -> Tensor:
    """Return the cross-entropy, in nats, of tokens given the logits at the positions before them.

    The general form, for parts of sequences: the token after a part's last one is in another part.

    Args:
        logits: (batch, seq, vocab), in any floating dtype; the loss is computed in float32.
        next_tokens: (batch, seq), int64, on any device: the token that each position predicts.
        ignored: (batch, seq), bool: positions that predict nothing; by default, the last one of each sequence.
        predictions: divisor of the sum: the number of predictions of the whole batch, of which this may be a part; by
            default batch * (seq - 1).

    Returns:
        A float32 scalar.
    """
    next_tokens = next_tokens.to(logits.device)
    if ignored is None and predictions is None:
        return through_compiler(_next_token_loss, logits, next_tokens)
    return _next_token_loss(logits, next_tokens, ignored, predictions)


def loss_to_compile(batch: int, seq: int, vocab_size: int, device: torch.device) -> PartToCompile:
    """Return the loss of float32 logits (batch, seq, vocab), as a part that a `Compiler` prepares."""
    logits = torch.empty(batch, seq, vocab_size, device=device, requires_grad=True)
    return _next_token_loss, (logits, torch.empty(batch, seq, dtype=torch.int64, device=device))


def _next_token_loss(
    logits: Tensor, next_tokens: Tensor, ignored: Tensor | None = None, predictions: float | None = None
) -> Tensor:
    """The loss."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if torch.compiler.is_compiling():
        losses = F.cross_entropy(wide.flatten(0, 1), next_tokens.flatten(), reduction="none")
        return losses.view_as(next_tokens)[:, :-1].mean()
    loss: Tensor = _NextTokenLoss.apply(wide, next_tokens, ignored, predictions)
    return loss


class _NextTokenLoss(torch.autograd.Function):
    """The same as F.cross_entropy, with two buffers of the logits' size instead of four."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, next_tokens: Tensor, ignored: Tensor | None, predictions: float | None
    ) -> Tensor:
        probabilities, next_token = logits.softmax(dim=-1), next_tokens.unsqueeze(-1)
        ctx.save_for_backward(probabilities, next_token)
        ctx.ignored, ctx.predictions = ignored, predictions or next_tokens[:, 1:].numel()
        # The log of the greatest probability, which is never 0 (the next token's may be), and the distance from it.
        # Logits are subtracted from each other first, because they may be large.
        distance = logits.amax(-1, keepdim=True) - logits.gather(-1, next_token)
        losses = (distance - probabilities.amax(-1, keepdim=True).log()).squeeze(-1)
        # To cut the last position off the logits, instead of the result, would copy them.
        losses = losses[:, :-1] if ignored is None else losses.masked_fill(ignored, 0)
        return losses.sum() / ctx.predictions

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, next_token = ctx.saved_tensors
        # The derivative of a prediction's cross-entropy is softmax(logits) - one_hot(next token).
        share = grad_loss / ctx.predictions
        grad = probabilities * share
        grad.scatter_add_(-1, next_token, -share.expand(next_token.shape))
        if ctx.ignored is None:
            grad[:, -1] = 0
        else:
            grad.masked_fill_(ctx.ignored.unsqueeze(-1), 0)
        return grad, None, None, None
