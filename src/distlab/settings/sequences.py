"""The settings of runs whose ranks share each sequence."""

from dataclasses import dataclass

from distlab.parallel.options import CPKind, CPOrder, check_sharing, padded_length
from distlab.settings.common import WorldSize
from distlab.settings.training import TrainSettings
from simplellm.errors import require


@dataclass
class SharedSequences:
    """The settings by which ranks share sequences."""

    cp_kind: CPKind = "ring"
    """how queries get the keys and values of other ranks"""
    cp_order: CPOrder = "zigzag"
    """which positions a rank holds: two chunks that give all ranks the same work, or one"""


@dataclass
class ContextSettings(WorldSize, TrainSettings):
    """A run whose ranks hold the whole model, and each a part of every sequence."""

    axis = "cp"

    world_size: int = 2
    """ranks, each with a part of every sequence"""


@dataclass
class EqualPartsSettings(ContextSettings):
    """A run whose ranks have parts of the same length, one after another."""

    @property
    def positions(self) -> int:
        return self.seq_len // self.world_size

    def check(self) -> None:
        super().check()
        seq, ranks = self.seq_len, self.world_size
        check_sharing(seq, self.num_heads, ranks, "gather", "--world-size")
        sentence = (
            f"this script cuts sequences into equal parts; give a multiple of {ranks}, or use cp-ring, which pads"
        )
        require(seq % ranks == 0, f"--seq-len {seq} with --world-size {ranks}: {sentence}")
        require(not self.document_mask, "--document-mask: this script has a mask of its own; use cp-ring")


@dataclass
class RingSettings(SharedSequences, ContextSettings):
    """A run whose ranks share sequences in one of several ways."""

    @property
    def positions(self) -> int:
        return padded_length(self.seq_len, self.world_size, self.cp_order) // self.world_size

    def check(self) -> None:
        super().check()
        check_sharing(self.seq_len, self.num_heads, self.world_size, self.cp_kind, "--world-size")
