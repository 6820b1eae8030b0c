"""The costs of the parts of the lab's Llama, from its sizes: weights, multiply-adds, bytes kept for backward passes.

A rank of a tensor-parallel group has the largest shard here; the others have as much, or a little less.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from distlab.pipeline.split import PartCosts
from simplellm.tokenizers import SPTokenizer

NUMBER_BYTES = 4  # float32
ID_BYTES = 8  # a token's number
FLAG_BYTES = 1
ModelPart = Literal["embedding", "block", "head"]
PARTS: tuple[ModelPart, ...] = ("embedding", "block", "head")
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model, as far as a rank holds it."""

    numbers: int
    is_rounded: bool = False  # by each pass, to the dtype of products: not routers and gains of norms
    of_expert: bool = False
    is_delayed: bool = False  # its gradient, by schedules with `BackwardWeight`: of a matrix, not of the embedding


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine the cost of a part; `vocab_size` matters only for the embedding and the head."""

    dmodel: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    seq_len: int
    vocab_size: int
    dtype: Dtype = "float32"  # between a norm and the next residual sum; all else is float32
    experts: int = 0  # of each block, each `hidden_dim` wide; 0: one network for all tokens
    experts_per_token: int = 1
    shared_experts: int = 0  # further ones that see all tokens
    compiled: bool = False  # passes, by `torch.compile`
    qk_norm: bool = False  # norms of the queries and keys of each head

    @classmethod
    def of(cls, settings: Any) -> "Sizes":
        """Return the sizes of the model that settings ask for; one that a script lacks has its usual value."""
        heads, hidden = settings.num_kv_heads or settings.num_heads, settings.hidden_dim or 4 * settings.dmodel
        vocab_size = getattr(settings, "vocab_size", None) or SPTokenizer(settings.tokenizer).vocab_size
        dtype: Dtype = getattr(settings, "dtype", "float32")
        sizes = cls(settings.dmodel, settings.num_heads, heads, hidden, settings.seq_len, vocab_size, dtype)
        sizes = replace(sizes, compiled=getattr(settings, "compile", False))
        if not getattr(settings, "experts", 0):
            return sizes
        return replace(
            sizes,
            experts=settings.experts,
            experts_per_token=settings.experts_per_token,
            shared_experts=int(settings.shared_expert),
            qk_norm=getattr(settings, "qk_norm", False),
        )

    @property
    def inner_bytes(self) -> int:
        """Bytes of a number between a norm and the next residual sum."""
        return 2 if self.dtype == "bfloat16" else NUMBER_BYTES

    @property
    def head_dim(self) -> int:
        return self.dmodel // self.num_heads

    @property
    def kv_width(self) -> int:
        """Width of all keys together, and of all values."""
        return self.head_dim * self.num_kv_heads

    @property
    def parts(self) -> PartCosts:
        """The multiply-adds by which a run divides the layers among stages."""
        return PartCosts(*(self.multiply_adds(part) for part in ("block", "embedding", "head")))

    @property
    def networks(self) -> int:
        """Feed-forward networks through which a token passes."""
        return self.experts_per_token + self.shared_experts

    def network_width(self, tp: int) -> int:
        """Return the width of a feed-forward network on a rank: slices of a layer compute whole experts."""
        return self.hidden_dim if self.experts else share(self.hidden_dim, tp)

    def matrices(self, part: ModelPart, tp: int = 1) -> int:
        """Return the number of one part's weights with which a rank multiplies a token, without the small router."""
        if part == "block":
            attention = share(2 * self.dmodel + 2 * self.kv_width, tp) * self.dmodel
            return attention + self.networks * 3 * self.dmodel * self.network_width(tp)
        return share(self.vocab_size, tp) * self.dmodel if part == "head" else 0

    def parameters(self, part: ModelPart, tp: int = 1, ep: int = 1) -> list[Parameter]:
        """Return a part's parameters that a rank trains, in the order of the model; gains of norms are whole."""
        width, rounds = self.dmodel, self.dtype != "float32"
        gain, vocabulary = Parameter(width), share(self.vocab_size, tp) * width
        if part == "embedding":
            return [Parameter(vocabulary)]
        if part == "head":
            return [gain, Parameter(vocabulary, rounds, is_delayed=True)]
        slices = share(width, tp), share(self.kv_width, tp), self.network_width(tp)
        query, key, matrix = (Parameter(width * wide, rounds, is_delayed=True) for wide in slices)
        block = [gain, query, key, key, query, *2 * self.qk_norm * [Parameter(self.head_dim)], gain]
        if not self.experts:
            return [*block, *3 * [matrix]]
        own = replace(matrix, of_expert=True)
        return [
            *block,
            Parameter(self.experts * width, is_delayed=True),
            *self.experts // ep * 3 * [own],
            *self.shared_experts * 3 * [matrix],
        ]

    def multiply_adds(self, part: ModelPart, tp: int = 1) -> float:
        """Return the number for a forward pass over one token; a backward pass takes twice that, half for weights."""
        if part == "embedding":
            return self.dmodel  # a look-up
        return self.matrices(part, tp) + (self.attention_multiply_adds(tp) if part == "block" else 0.0)

    def attention_multiply_adds(self, tp: int = 1) -> float:
        """Return the number for a token's causal scores in one block, and for the sum of values with them."""
        return self.dmodel * self.seq_len / tp

    def table_bytes(self) -> int:
        """Return the bytes of the cosines and sines of rotary positions, which all blocks of a process share."""
        return self.seq_len * (self.head_dim + self.head_dim // 2) * NUMBER_BYTES


@dataclass(frozen=True)
class Model:
    """The sizes of a model, and the number of its blocks."""

    sizes: Sizes
    n_layers: int

    @classmethod
    def of(cls, settings: Any) -> "Model":
        return cls(Sizes.of(settings), settings.n_layers)


def share(total: int, ranks: int) -> int:
    """Return the largest of the shares in which `ranks` divide `total`."""
    return -(-total // ranks)
