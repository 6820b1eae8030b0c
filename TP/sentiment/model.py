"""A BERT-like text classifier in one process; tp_model.py shards it over several ranks.

It is simpler than BERT (Devlin et al., arXiv 1810.04805): no position encoding, so the model knows the words of a text
but not their order; no biases; and norms before attention and feed-forward, not after them.
"""

import math

import torch
from torch import Tensor, nn


class MultiHeadSelfAttention(nn.Module):
    """Bidirectional self-attention with `num_heads` heads.

    Scores are divided by the root of `hidden_dim`, the width of all heads together, not of one head.

    Raises:
        ValueError: `hidden_dim` does not divide into `num_heads`.
    """

    def __init__(self, hidden_dim: int, num_heads: int, dropout_prob: float) -> None:
        super().__init__()
        if hidden_dim % num_heads:
            raise ValueError(f"a width of {hidden_dim} does not divide into {num_heads} attention heads")
        self.head_dim, self.scale = hidden_dim // num_heads, 1 / math.sqrt(hidden_dim)
        self.q = nn.Linear(hidden_dim, hidden_dim, bias=False)
        self.k = nn.Linear(hidden_dim, hidden_dim, bias=False)
        self.v = nn.Linear(hidden_dim, hidden_dim, bias=False)
        self.output = nn.Linear(hidden_dim, hidden_dim, bias=False)
        self.dropout: nn.Module = nn.Dropout(dropout_prob)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """`x` (batch, seq, hidden) to the same shape.

        Args:
            x: the positions.
            attention_mask: added to the scores (batch, heads, seq, seq), to which it must broadcast: 0 for a position
                that may be attended to, -inf for padding.
        """
        q, k, v = (self._heads(linear(x)) for linear in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) * self.scale + attention_mask
        collected = self.dropout(scores.softmax(dim=-1).to(v.dtype)) @ v
        y: Tensor = self.output(collected.transpose(1, 2).flatten(2))
        return y

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, seq, heads · head_dim) as (batch, heads, seq, head_dim)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForwardBlock(nn.Module):
    """Two linear layers (in, mid) and (mid, out), with `modules` between them, by default a GELU."""

    def __init__(
        self, in_dim: int, mid_dim: int, out_dim: int, modules: nn.Module | list[nn.Module] | None = None
    ) -> None:
        super().__init__()
        modules = nn.GELU() if modules is None else modules
        self.first_linear: nn.Module = nn.Linear(in_dim, mid_dim, bias=False)
        self.between = nn.Sequential(*([modules] if isinstance(modules, nn.Module) else modules))
        self.second_linear: nn.Module = nn.Linear(mid_dim, out_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out)."""
        y: Tensor = self.second_linear(self.between(self.first_linear(x)))
        return y


class ResNorm(nn.Module):
    """A residual connection around a norm, a layer, and dropout."""

    def __init__(self, layer: nn.Module, hidden_dim: int, dropout_prob: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_dim, bias=False)
        self.layer = layer
        self.dropout = nn.Dropout(dropout_prob)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """`x` (…, hidden) to the same shape; `others` are further arguments of the layer."""
        return x + self.dropout(self.layer(self.norm(x), *others))


class Block(nn.Module):
    """Attention, then a feed-forward block with four times the width inside."""

    attention_type: type[nn.Module] = MultiHeadSelfAttention
    pair_type: type[nn.Module] = FeedForwardBlock

    def __init__(self, hidden_dim: int, num_heads: int, dropout_prob: float) -> None:
        super().__init__()
        attention = self.attention_type(hidden_dim, num_heads, dropout_prob)
        self.attention = ResNorm(attention, hidden_dim, dropout_prob)
        pair = self.pair_type(hidden_dim, 4 * hidden_dim, hidden_dim, nn.GELU())
        self.feed_forward = ResNorm(pair, hidden_dim, dropout_prob)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """`x` (batch, seq, hidden) to the same shape; the mask is as in `MultiHeadSelfAttention`."""
        y: Tensor = self.feed_forward(self.attention(x, attention_mask))
        return y


class Classifier(nn.Module):
    """Maps the output at the first position to a score for each class."""

    pair_type: type[nn.Module] = FeedForwardBlock

    def __init__(self, hidden_dim: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_dim, bias=False)
        self.pair = self.pair_type(hidden_dim, hidden_dim, num_classes, nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        """`x` (batch, seq, hidden) to logits (batch, classes)."""
        y: Tensor = self.pair(self.norm(x[:, 0]))
        return y


class Transformer(nn.Module):
    """Embedding, blocks, classifier.

    Args:
        vocab_size: token ids are 0 to vocab_size - 1.
        hidden_dim: width of the model.
        num_layers: blocks.
        num_heads: attention heads of each.
        num_classes: number of classes.
        dropout_prob: fraction of attention weights, and of each layer's outputs, that is zeroed in training.
    """

    embedding_type: type[nn.Module] = nn.Embedding
    block_type: type[Block] = Block
    classifier_type: type[Classifier] = Classifier

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int,
        num_layers: int,
        num_heads: int,
        num_classes: int = 2,
        dropout_prob: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = self.embedding_type(vocab_size, hidden_dim)
        self.blocks = nn.ModuleList(self.block_type(hidden_dim, num_heads, dropout_prob) for _ in range(num_layers))
        self.classifier = self.classifier_type(hidden_dim, num_classes)

    def forward(self, tokens: Tensor, is_padding: Tensor) -> Tensor:
        """`tokens` (batch, seq) to logits (batch, classes); `is_padding` (batch, seq) marks those to leave out."""
        x = self.embedding(tokens)
        mask = torch.zeros(is_padding.shape, device=x.device).masked_fill(is_padding, -math.inf)[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.classifier(x)
        return logits
