"""The classifier of model.py, sharded over the ranks of a tensor-parallel group.

Every rank has the full input and the full output of each layer, and computes in between with its own shard of the
weights (Megatron-LM: Shoeybi et al., arXiv 1909.08053, figure 3). Shard r of n is the r-th of n equal slices of the
matrix that one process draws from the same seed. So if all ranks of a group have the same seed, the group starts from
the same weights as one process. drawing.py draws them, and leaves torch's random generator as it was.
"""

import model
import pcomm
from drawing import ShardDropout, check_division, for_shards, unmoved_generator
from torch import Tensor, nn

from distlab.axes.placement import DimSlice, Placement, place

ResNorm = model.ResNorm  # norms and residuals are computed by every rank, in full


def keep_shard(layer: nn.Module, dim: int) -> None:
    """Replace a layer's weight by this rank's shard along `dim`: 0 its outputs (columns of W in xW), 1 its inputs.

    Its placement gives its position in the whole weight, for checkpoints.
    """
    whole = layer.get_parameter("weight").detach()
    layer.weight = own = nn.Parameter(whole.chunk(pcomm.tp_degree, dim)[pcomm.tp_rank].clone())
    where = DimSlice(dim, pcomm.tp_rank * own.shape[dim], whole.shape[dim], pcomm.slices.names)
    place(own, Placement((where,)))


class ColWiseLinear(nn.Module):
    """A linear layer split by its outputs: `linear.weight` is (out / degree, in).

    Raises:
        InputError: the outputs do not divide among the ranks.
    """

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        check_division(out_dim, "a layer's output width of")
        with unmoved_generator():
            self.linear = nn.Linear(in_dim, out_dim, bias=False)
        keep_shard(self.linear, 0)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out)."""
        y: Tensor = pcomm.AllGather.apply(self.linear(pcomm.Duplication.apply(x)))
        return y


class Embedding(nn.Module):
    """An embedding split by its width: `mod.weight` is (vocab, hidden / degree).

    Raises:
        InputError: the width does not divide among the ranks.
    """

    def __init__(self, vocab_size: int, hidden_dim: int) -> None:
        super().__init__()
        check_division(hidden_dim, "an embedding's width of")
        with unmoved_generator():
            self.mod = nn.Embedding(vocab_size, hidden_dim)
        keep_shard(self.mod, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (…) to (…, hidden)."""
        x: Tensor = pcomm.AllGather.apply(self.mod(tokens))
        return x


class MultiHeadSelfAttention(model.MultiHeadSelfAttention):
    """Attention split by heads: `q|k|v.weight` are (hidden / degree, hidden), `output.weight` is the reverse.

    Raises:
        InputError: the heads do not divide among the ranks.
    """

    def __init__(self, hidden_dim: int, num_heads: int, dropout_prob: float) -> None:
        check_division(num_heads, "a number of attention heads of")
        with unmoved_generator():
            super().__init__(hidden_dim, num_heads, dropout_prob)
        self.num_heads = num_heads
        for linear in (self.q, self.k, self.v):
            keep_shard(linear, 0)
        keep_shard(self.output, 1)
        self.dropout = ShardDropout(dropout_prob, dim=1)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """`x` (batch, seq, hidden) to the same shape; if a mask has heads, each rank uses its own heads' part."""
        mask: Tensor = pcomm.Duplication.apply(attention_mask)  # which may be trained
        if mask.dim() > 2 and mask.shape[-3] != 1:
            if mask.shape[-3] != self.num_heads:
                raise ValueError(f"a mask for {mask.shape[-3]} heads, and {self.num_heads} attention heads")
            mask = mask.chunk(pcomm.tp_degree, -3)[pcomm.tp_rank]
        y: Tensor = pcomm.AllReduce.apply(super().forward(pcomm.Duplication.apply(x), mask))
        return y


class ColRowLinearPair(model.FeedForwardBlock):
    """Two linear layers, the first split by its outputs, the second by its inputs: one sum instead of two gathers.

    It replaces a `FeedForwardBlock`. `first_linear.weight` is (mid / degree, in), `second_linear.weight` (out,
    mid / degree). `modules` run between the two, on this rank's shard of the inner width: they must be element-wise,
    and have no weights.

    Raises:
        InputError: the inner width does not divide among the ranks, or the modules cannot run on shards.
    """

    def __init__(
        self, in_dim: int, mid_dim: int, out_dim: int, modules: nn.Module | list[nn.Module] | None = None
    ) -> None:
        check_division(mid_dim, "the inner width of a pair of layers of")
        with unmoved_generator():
            super().__init__(in_dim, mid_dim, out_dim, modules)
        for number, module in enumerate(self.between):
            self.between[number] = for_shards(module)
        keep_shard(self.first_linear, 0)
        keep_shard(self.second_linear, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = pcomm.AllReduce.apply(super().forward(pcomm.Duplication.apply(x)))
        return y


FeedForwardBlock = ColRowLinearPair


class Block(model.Block):
    """Attention and a feed-forward block, each of which ends with one sum over the ranks."""

    attention_type = MultiHeadSelfAttention
    pair_type = ColRowLinearPair
    __init__ = unmoved_generator()(model.Block.__init__)


class Classifier(model.Classifier):
    """Maps the first position to a score for each class."""

    pair_type = ColRowLinearPair
    __init__ = unmoved_generator()(model.Classifier.__init__)


class Transformer(model.Transformer):
    """Embedding, blocks, classifier."""

    embedding_type = Embedding
    block_type = Block
    classifier_type = Classifier
    __init__ = unmoved_generator()(model.Transformer.__init__)
