"""Attention of queries to one block of the keys, in a form that can be merged over blocks, and its backward pass.

A softmax over all keys can be computed from softmaxes over blocks of them, if each block also gives the logarithm of
the sum of its exponentials (Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867). The
backward pass of a block takes the output and the sum over all keys, and so needs no other block.

On the CPU, the private kernels behind `F.scaled_dot_product_attention` are called; a test compares them with
`plain_forward` and `plain_backward`, which serve all other cases.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from simplellm.mixed_precision import widen

Mask = Tensor | Literal["causal"] | None
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
# Up to this many numbers in a head (tokens * width), a CPU computes the kernel's backward pass faster in float32 than
# in bfloat16. On a Xeon with AMX, conversions included, 128 tokens in heads of 64 take 0.4 of the time and 256 in heads
# of 48 take 0.6 to 0.9. Beyond, bfloat16 is faster in wide heads: 256 tokens in heads of 64 take 1.2 times as long.
LARGEST_IN_FLOAT32 = 256 * 48


def attention_block(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return the attention of queries to a block of keys and values, and the logarithms of the sums of exponentials.

    Args:
        q: (batch, heads, queries, head_dim).
        k, v: (batch, key heads, keys, head_dim); each key head serves as many heads as the others.
        mask: the keys that a query attends to: (batch or 1, 1, queries, keys), bool; "causal" for the keys up to its
            own place among as many keys; None for all.

    Returns:
        (batch, heads, queries, head_dim), and (batch, heads, queries), -inf for queries that attend to no key. Both are
        float32, or float64 for such queries.
    """
    if q.device.type != "cpu" or not hasattr(torch.ops.aten, _KERNEL):
        return plain_forward(q, k, v, mask)
    kernel, (q, k, v) = getattr(torch.ops.aten, _KERNEL), map(widen, (q, k, v))
    out, total = kernel(q, k, v, 0.0, _is_causal(mask), attn_mask=_as_bias(mask, q))
    if isinstance(mask, Tensor):  # the kernel gives 0 for a query without keys
        total = total.masked_fill(~mask.any(-1), -math.inf)
    return _wide(out), total


def attention_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v that come from one block, in their dtype.

    Args:
        grad: of the output, with its shape and the dtype of `q`.
        out, total: the output and the logarithms of the sums over all blocks.
    """
    if q.device.type != "cpu" or not hasattr(torch.ops.aten, _KERNEL):
        return plain_backward(grad, q, k, v, out, total, mask)
    kernel, dtype = getattr(torch.ops.aten, f"{_KERNEL}_backward"), q.dtype
    is_small = q.shape[-2] * q.shape[-1] <= LARGEST_IN_FLOAT32
    grad, q, k, v = map(_wide if is_small else widen, (grad, q, k, v))
    grads: tuple[Tensor, Tensor, Tensor] = kernel(
        grad, q, k, v, out.to(q.dtype), total, 0.0, _is_causal(mask), attn_mask=_as_bias(mask, q)
    )
    return grads[0].to(dtype), grads[1].to(dtype), grads[2].to(dtype)


class CausalAttention(torch.autograd.Function):
    """Attention of each query to the keys up to its own place, with the backward pass of `attention_block_backward`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, total = attention_block(q, k, v, "causal")
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, total = ctx.saved_tensors
        return attention_block_backward(grad, q, k, v, out, total, "causal")


def plain_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Compute `attention_block` with the operations of the formula."""
    scores = _scores(q, k, mask)
    total = scores.logsumexp(-1)
    shares = (scores - total.unsqueeze(-1)).exp().nan_to_num()  # 0 for a query without keys
    return shares @ _wide(_for_each_head(v, q)), total


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attention_block_backward` with the operations of the formula."""
    wide_grad = _wide(grad)
    shares = (_scores(q, k, mask) - total.unsqueeze(-1)).exp()
    grad_shares = wide_grad @ _wide(_for_each_head(v, q)).transpose(-1, -2)
    grad_scores = shares * (grad_shares - (wide_grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    grad_q = grad_scores @ _wide(_for_each_head(k, q))
    grad_k, grad_v = grad_scores.transpose(-1, -2) @ _wide(q), shares.transpose(-1, -2) @ wide_grad
    in_groups = [part.unflatten(1, (k.shape[1], -1)).sum(2) for part in (grad_k, grad_v)]
    return grad_q.to(q.dtype), in_groups[0].to(k.dtype), in_groups[1].to(v.dtype)


def merge(out: Tensor, total: Tensor, block: Tensor, block_total: Tensor) -> None:
    """Add the attention to a block to the attention to other blocks, in place; `total` is not -inf.

    Shapes and dtypes as of `attention_block`'s results.
    """
    difference = block_total - total
    out -= F.sigmoid(difference).unsqueeze(-1) * (out - block)
    total -= F.logsigmoid(-difference)


def _scores(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    scores = _wide(q) @ _wide(_for_each_head(k, q)).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if _is_causal(mask):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~mask, -math.inf) if isinstance(mask, Tensor) else scores


def _for_each_head(heads: Tensor, q: Tensor) -> Tensor:
    return heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _as_bias(mask: Mask, q: Tensor) -> Tensor | None:
    """Return the bias that the kernel adds to the scores."""
    if not isinstance(mask, Tensor):
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)


def _is_causal(mask: Mask) -> bool:
    return isinstance(mask, str)
