"""The loss of a causal language model."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from simplellm.errors import InputError


def causalLLMLoss(logits: Tensor, target: Tensor, vocab_size: int) -> Tensor:
    """Mean cross-entropy, in nats, of each token given the tokens before it.

    The function does the shift: position t of `logits` predicts token t + 1 of `target`, so `target` is the same tensor
    that went into the model.

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
    loss: Tensor = _NextTokenLoss.apply(logits.float().reshape(batch, seq, vocab_size), target.to(logits.device))
    return loss


class _NextTokenLoss(torch.autograd.Function):
    """The same as F.cross_entropy, with two buffers of the logits' size instead of four."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        probabilities = logits.softmax(dim=-1)
        # The last position, whose next token would wrap around to the first, is excluded from the result. Cutting it
        # off the logits would copy them.
        next_token = target.roll(-1, dims=1).unsqueeze(-1)
        ctx.save_for_backward(probabilities, next_token)
        # The log of the greatest probability, which is never 0, as that of the next token may be; and the distance from
        # it. Logits are subtracted from each other first, because they may be large.
        distance = logits.amax(-1, keepdim=True) - logits.gather(-1, next_token)
        return (distance - probabilities.amax(-1, keepdim=True).log())[:, :-1].mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None]:
        probabilities, next_token = ctx.saved_tensors
        # The derivative of a prediction's cross-entropy is softmax(logits) - one_hot(next token).
        share = grad_loss / next_token[:, 1:].numel()
        grad = probabilities * share
        grad.scatter_add_(-1, next_token, -share.expand(next_token.shape))
        grad[:, -1] = 0
        return grad, None
