"""The costs of attention where ranks share sequences, in each of the ways of `distlab.parallel.context_parallel`."""

from dataclasses import dataclass

from distlab.parallel.options import CPKind, CPOrder, padded_length
from distlab_planner.model import NUMBER_BYTES, Sizes


@dataclass(frozen=True)
class SharedAttention:
    """The attention of one block to a micro-batch, of which each rank holds some positions.

    Attributes:
        sizes: the sizes of the model.
        rows: sequences of the micro-batch.
        ranks: the ranks that share each sequence; with one, nothing here costs anything.
        tp: the ranks that share the heads.
    """

    sizes: Sizes
    rows: int
    ranks: int = 1
    kind: CPKind = "ring"
    order: CPOrder = "zigzag"
    tp: int = 1

    @property
    def seq(self) -> int:
        """Length of the sequences, with padding."""
        return padded_length(self.sizes.seq_len, self.ranks, self.order)

    @property
    def positions(self) -> int:
        """Positions of a sequence on each rank."""
        return self.seq // self.ranks

    @property
    def keys(self) -> int:
        """Numbers of a rank's own keys and values."""
        return 2 * self.rows * self.positions * self.sizes.kv_width // self.tp

    @property
    def heads(self) -> int:
        """Numbers of a rank's own queries, keys, values and results; keys repeated until the ranks can share them."""
        heads, key_heads = self.sizes.num_heads // self.tp, self.sizes.num_kv_heads // self.tp
        exchanged = 2 * heads + 2 * (key_heads if key_heads % self.ranks == 0 else heads)
        return exchanged * self.sizes.head_dim * self.rows * self.positions

    @property
    def kept_bytes(self) -> int:
        """Bytes that the backward pass needs, in addition to the block's own without other ranks."""
        if self.ranks == 1:
            return 0
        if self.kind == "gather":  # the keys and values of the other ranks
            return (self.ranks - 1) * self.keys * self.sizes.inner_bytes
        numbers = self.rows * self.positions * self.sizes.dmodel // self.tp
        if self.kind == "ring":  # the output in float32, besides the one in bfloat16
            return numbers * NUMBER_BYTES * (self.sizes.inner_bytes != NUMBER_BYTES)
        output = numbers * self.sizes.inner_bytes  # before it goes home
        repeated = self.sizes.num_kv_heads // self.tp % self.ranks != 0
        more = 2 * (self.sizes.dmodel - self.sizes.kv_width) // self.tp * repeated
        return output + self.rows * self.positions * more * self.sizes.inner_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes of queries, keys and values that are needed as they were received, in place of a rank's own."""
        kept = {"ring": 0, "gather": 2 * self.sizes.kv_width, "heads": self.sizes.dmodel + 2 * self.sizes.kv_width}
        numbers = self.rows * self.positions * kept[self.kind] // self.tp
        return numbers * self.sizes.inner_bytes * (self.ranks > 1)

    @property
    def mask_bytes(self) -> int:
        """Bytes of the mask for gathered keys, which all blocks of a stage share."""
        return self.positions * self.seq * self.sizes.inner_bytes if self.ranks > 1 and self.kind == "gather" else 0

    @property
    def table_bytes(self) -> int:
        """Bytes of the rows of the rotary tables, which all blocks of a stage share."""
        return self.sizes.table_bytes() * self.positions // self.sizes.seq_len

    @property
    def work(self) -> float:
        """Pairs of queries and keys that the busiest rank computes, to the mean of the ranks' causal pairs."""
        if self.ranks == 1 or self.kind == "heads":
            return 1.0
        if self.kind == "gather":  # a mask does not shorten the computation
            return 2.0
        return 1.0 if self.order == "zigzag" else 2.0 - 1 / self.ranks
