"""The costs of the parts of the lab's Llama, from its sizes: weights, multiply-adds, bytes kept for backward passes.

A rank of a tensor-parallel group has the largest shard here; the others have as much, or a little less.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from distlab.pipeline.split import PartCosts
from simplellm.tokenizers import SPTokenizer

NUMBER_BYTES = 4  # float32
ID_BYTES = 8  # a token's number
FLAG_BYTES = 1
ModelPart = Literal["embedding", "block", "head"]
PARTS: tuple[ModelPart, ...] = ("embedding", "block", "head")
Dtype = Literal["float32", "bfloat16"]


class ModelSettings(Protocol):
    """The settings that determine a model's sizes."""

    dmodel: int
    num_heads: int
    num_kv_heads: int | None
    hidden_dim: int | None
    seq_len: int
    tokenizer: Path | None


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

    @classmethod
    def of(cls, settings: ModelSettings) -> "Sizes":
        """Return the sizes of the model that settings ask for."""
        heads, hidden = settings.num_kv_heads or settings.num_heads, settings.hidden_dim or 4 * settings.dmodel
        vocab_size = getattr(settings, "vocab_size", None) or SPTokenizer(settings.tokenizer).vocab_size
        dtype: Dtype = getattr(settings, "dtype", "float32")
        return cls(settings.dmodel, settings.num_heads, heads, hidden, settings.seq_len, vocab_size, dtype)

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

    def matrices(self, part: ModelPart, tp: int = 1) -> int:
        """Return the number of one part's weights with which a rank multiplies."""
        if part == "block":
            return share(2 * self.dmodel + 2 * self.kv_width, tp) * self.dmodel + 3 * self.dmodel * share(
                self.hidden_dim, tp
            )
        return share(self.vocab_size, tp) * self.dmodel if part == "head" else 0

    def weights(self, part: ModelPart, tp: int = 1) -> int:
        """Return the number of a part's weights on a rank. The gains of the norms are whole on every rank."""
        if part == "embedding":
            return share(self.vocab_size, tp) * self.dmodel
        return self.matrices(part, tp) + (2 if part == "block" else 1) * self.dmodel

    def multiply_adds(self, part: ModelPart, tp: int = 1) -> float:
        """Return the number for a forward pass over one token; a backward pass takes twice that, half for weights."""
        if part == "embedding":
            return self.dmodel  # a look-up
        return self.matrices(part, tp) + (self.attention_multiply_adds(tp) if part == "block" else 0.0)

    def attention_multiply_adds(self, tp: int = 1) -> float:
        """Return the number for a token's causal scores in one block, and for the sum of values with them."""
        return self.dmodel * self.seq_len / tp

    def kept_bytes(self, part: ModelPart, tokens: int, tp: int = 1) -> int:
        """Return the bytes that a forward pass over `tokens` keeps for the backward pass, without recomputation."""
        width, hidden = self.dmodel, share(self.hidden_dim, tp)
        if part == "embedding":  # besides the ids: if the vocabulary is shared, which rows they have here, and a mask
            return tokens * (ID_BYTES + FLAG_BYTES) * (tp > 1)
        norm = (width + 1) * NUMBER_BYTES + width * self.inner_bytes  # input, root mean square; output
        if part == "head":  # probabilities; targets
            return tokens * (norm + NUMBER_BYTES * share(self.vocab_size, tp) + ID_BYTES + FLAG_BYTES * (tp > 1))
        attention = (2 * width + 2 * self.kv_width) * self.inner_bytes + self.num_heads * NUMBER_BYTES
        return tokens * (2 * norm + attention // tp + 4 * hidden * self.inner_bytes)

    def factor_bytes(self, part: ModelPart, tokens: int, tp: int = 1) -> int:
        """Return the part kept between `BackwardInput` and `BackwardWeight`: inputs and gradients of linear layers."""
        width, hidden = self.dmodel, share(self.hidden_dim, tp)
        if part == "embedding":
            return 0
        if part == "head":
            return tokens * self.inner_bytes * (width + share(self.vocab_size, tp))
        inputs = 2 * width + width // tp + hidden
        return tokens * self.inner_bytes * (inputs + (width + 2 * self.kv_width) // tp + 2 * width + 2 * hidden)

    def table_bytes(self) -> int:
        """Return the bytes of the cosines and sines of rotary positions, which all blocks of a process share."""
        return self.seq_len * (self.head_dim + self.head_dim // 2) * NUMBER_BYTES


@dataclass(frozen=True)
class Model:
    """The sizes of a model, and the number of its blocks."""

    sizes: Sizes
    n_layers: int


def share(total: int, ranks: int) -> int:
    """Return the largest of the shares in which `ranks` divide `total`."""
    return -(-total // ranks)
