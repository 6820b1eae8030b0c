"""The settings of runs whose ranks share each sequence."""

from dataclasses import dataclass
from typing import Literal

from distlab.axes.layout import Layout
from distlab.settings.common import WorldSize
from distlab.settings.training import TrainSettings
from simplellm.errors import require


@dataclass
class SharedSequences:
    """The settings by which ranks share sequences."""

    cp_kind: Literal["ring", "gather", "heads"] = "ring"
    """how queries get the keys and values of other ranks"""
    cp_order: Literal["zigzag", "contiguous"] = "zigzag"
    """which positions a rank holds: two chunks that give all ranks the same work, or one"""

    def check_sequences(self, seq_len: int, heads: int, ranks: int, flag: str) -> None:
        """Raise `InputError` unless `ranks`, which `flag` sets, can share sequences."""
        require_positions(seq_len, ranks, flag)
        advice = f"each rank gets as many of {heads} heads as the others; give a divisor, or another --cp-kind"
        is_possible = self.cp_kind != "heads" or heads % ranks == 0
        require(is_possible, f"--cp-kind heads with {flag} {ranks}: {advice}")


@dataclass
class ContextSettings(WorldSize, TrainSettings):
    """A run whose ranks hold the whole model, and each a part of every sequence."""

    world_size: int = 2
    """ranks, each with a part of every sequence"""

    @property
    def layout(self) -> Layout:
        return {"cp": self.world_size}


@dataclass
class EqualPartsSettings(ContextSettings):
    """A run whose ranks have parts of the same length, one after another."""

    def check(self) -> None:
        super().check()
        seq, ranks = self.seq_len, self.world_size
        require_positions(seq, ranks, "--world-size")
        sentence = (
            f"this script cuts sequences into equal parts; give a multiple of {ranks}, or use cp-ring, which pads"
        )
        require(seq % ranks == 0, f"--seq-len {seq} with --world-size {ranks}: {sentence}")
        require(not self.document_mask, "--document-mask: this script has a mask of its own; use cp-ring")


@dataclass
class RingSettings(SharedSequences, ContextSettings):
    """A run whose ranks share sequences in one of several ways."""

    def check(self) -> None:
        super().check()
        self.check_sequences(self.seq_len, self.num_heads, self.world_size, "--world-size")


def require_positions(seq_len: int, ranks: int, flag: str) -> None:
    """Raise `InputError` unless each rank gets some positions of a sequence."""
    least = 2 * ranks
    require(ranks == 1 or seq_len >= least, f"--seq-len {seq_len} with {flag} {ranks}: give at least {least} tokens")
