"""The attention and the positions of the tokens of a sequence.

By default a sequence has the positions 0, 1, 2, …, and each token attends to all before it and to itself.
`simplellm.documents` separates documents that were joined to one sequence. A rank that holds a part of a sequence has
its own positions and attention (`distlab.parallel.context_parallel`).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from simplellm.mixed_precision import dtype_of_product, widen

# Queries (batch, heads, seq, head_dim), keys and values (batch, key heads, seq, head_dim) -> like the queries.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SequencePart:
    """Tokens of one or more sequences.

    Attributes:
        positions: for the rotary embedding, int64: (seq,), or (batch, seq) where sequences differ.
        attend: the attention of their queries to keys and values.
    """

    positions: Tensor
    attend: Attend


def attend_to_earlier(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend, from each query, to the keys up to its own position, or to the keys of a mask (batch, 1, queries, keys).

    A single query attends to all keys. torch computes the attention block by block, without storing the (seq, seq)
    scores (FlashAttention: Dao et al., arXiv 2205.14135). With fewer key heads than query heads, it is grouped-query
    attention (Ainslie et al., arXiv 2305.13245).
    """
    grouped = k.shape[1] != q.shape[1]
    if grouped and not _attends_in_groups(q):
        k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
        grouped = False
    is_causal = mask is None and q.shape[2] == k.shape[2]
    if is_causal and q.dtype == torch.bfloat16 and q.device.type == "cpu" and q.requires_grad:
        from simplellm.attention_blocks import CausalAttention

        return CausalAttention.apply(q, k, v)
    dtype, (q, k, v) = q.dtype, map(widen, (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=grouped).to(dtype)


def attend_with(mask: Tensor) -> Attend:
    """Return the attention to the keys of a mask, (batch or 1, 1, queries, keys), bool.

    torch adds a mask to the scores as numbers. All layers keep the same ones for their backward passes.
    """

    @functools.cache
    def bias(dtype: torch.dtype) -> Tensor:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)

    return lambda q, k, v: attend_to_earlier(q, k, v, bias(dtype_of_product(q)))


def _attends_in_groups(q: Tensor) -> bool:
    """Return whether torch computes grouped-query attention block by block for such queries.

    On CUDA, its block-wise kernels with groups support only half precision; float32 would use a kernel that stores all
    (seq, seq) scores. With keys and values repeated for each query head, float32 also has a block-wise kernel there.
    """
    return q.device.type != "cuda" or q.dtype != torch.float32
