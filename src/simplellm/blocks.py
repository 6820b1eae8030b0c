"""The blocks of a Llama and its head: attention and feed-forward layers, each behind a norm."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from simplellm.attention import Attend, attend_to_earlier
from simplellm.compiled import through_compiler
from simplellm.layers import MLP, Linear, RMSNorm, rotate

if TYPE_CHECKING:
    from simplellm.cache import LayerCache


class Attention(nn.Module):
    """Causal self-attention with rotary positions.

    The number of heads follows from the projections' output, so the projections may hold some heads only.
    """

    def __init__(
        self,
        dmodel: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        qk_norm: Callable[[], RMSNorm] | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = Linear(dmodel, num_heads * self.head_dim, bias=bias)
        self.k_proj = Linear(dmodel, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(dmodel, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = Linear(num_heads * self.head_dim, dmodel, bias=bias)
        self.q_norm = qk_norm() if qk_norm else None
        self.k_norm = qk_norm() if qk_norm else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: "LayerCache | None" = None, attend: Attend = attend_to_earlier
    ) -> Tensor:
        """(batch, seq, dmodel) -> the same; `cos` and `sin` are the seq rows of the tables for these positions."""
        if cache is None and attend is attend_to_earlier:
            return through_compiler(Attention.compute, self, x, cos, sin)
        return self.compute(x, cos, sin, cache, attend)

    def compute(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: "LayerCache | None" = None, attend: Attend = attend_to_earlier
    ) -> Tensor:
        """Attention."""
        batch, seq, _ = x.shape
        q, k = (proj(x).view(batch, seq, -1, self.head_dim) for proj in (self.q_proj, self.k_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (norm(y.to(norm.weight.dtype)) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        q, k = (rotate(heads, cos, sin) for heads in (q, k))
        v = self.v_proj(x).view(batch, seq, -1, self.head_dim)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        if cache is not None:
            past = cache.length
            k, v = cache.append(k, v)
            if past and seq > 1:  # each position attends to all earlier ones and itself
                mask = torch.ones(seq, past + seq, dtype=torch.bool, device=x.device).tril(past)
                attend = partial(attend_to_earlier, mask=mask)
        mixed = attend(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, -1).to(x.dtype))


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and added to the residual stream (batch, seq, dmodel)."""

    def __init__(self, attention: Attention, mlp: nn.Module, norm: Callable[[], RMSNorm]) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = norm(), attention
        self.post_attention_layernorm, self.mlp = norm(), mlp

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: "LayerCache | None" = None, attend: Attend = attend_to_earlier
    ) -> Tensor:
        if cache is None and attend is attend_to_earlier and isinstance(self.mlp, MLP):
            return through_compiler(Block.compute, self, x, cos, sin)
        return self.compute(x, cos, sin, cache, attend)

    def compute(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: "LayerCache | None" = None, attend: Attend = attend_to_earlier
    ) -> Tensor:
        """A block."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, attend)
        return x + self.mlp(self.post_attention_layernorm(x)).to(x.dtype)  # experts return float32


def logits(norm: RMSNorm, head: Linear, x: Tensor) -> Tensor:
    """The head."""
    logits: Tensor = head(norm(x))
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
