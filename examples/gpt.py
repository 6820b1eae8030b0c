"""A small GPT with learned positions, biases and plain `nn.Linear` layers: a model that knows nothing of the lab.

The scripts beside it train it: `gpt_dp.py`, `gpt_mydp.py`, `gpt_zero.py`, `gpt_pp.py`, `gpt_tp.py`. Every rank builds
the whole model from the same seed, and keeps its part of it, under the same names.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ARCHITECTURE = "gpt"  # in checkpoints, so that no other model resumes them


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, width) -> the same; the number of heads follows from the projections."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """The model, or a stage of it: the first has the embeddings, the last the norm and the head."""

    def __init__(self, vocab_size: int, args: Any) -> None:
        super().__init__()
        torch.manual_seed(args.seed)
        self.tokens: nn.Module | None = nn.Embedding(vocab_size, args.dmodel)
        self.positions: nn.Embedding | None = nn.Embedding(args.seq_len, args.dmodel)
        self.blocks = nn.ModuleDict({str(i): Block(args.dmodel, args.num_heads) for i in range(args.n_layers)})
        self.norm: nn.Module | None = nn.LayerNorm(args.dmodel)
        self.head: nn.Module | None = nn.Linear(args.dmodel, vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (batch, seq), or activations (batch, seq, width), -> activations, or logits (batch, seq, vocab)."""
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))

    def keep_stage(self, stage: int, layers: Sequence[int]) -> "GPT":
        """Keep one stage of a pipeline, given the number of layers of each stage."""
        first = sum(layers[:stage])
        for name in list(self.blocks):
            if not first <= int(name) < first + layers[stage]:
                del self.blocks[name]
        if stage > 0:
            self.tokens = self.positions = None
        if stage < len(layers) - 1:
            self.norm = self.head = None
        return self
