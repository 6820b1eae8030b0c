"""The settings of runs whose ranks hold slices of every layer."""

from dataclasses import dataclass

from distlab.checkpoints.format import Checkpoint
from distlab.parallel.options import check_division
from distlab.settings.common import WorldSize
from distlab.settings.training import TrainSettings
from simplellm.errors import require


@dataclass
class SlicesPerRank(WorldSize, TrainSettings):
    """A run whose ranks hold a slice of every layer."""

    axis = "tp"

    world_size: int = 3
    """ranks, each with a slice of every layer"""


@dataclass
class TensorParallelSettings(SlicesPerRank):
    """A run whose ranks hold whole attention heads."""

    def check(self) -> None:
        super().check()
        check_division(self.num_heads, self.num_kv_heads, self.world_size)
        sentence = "the planner knows ranks that split the vocabulary too, which this script does not"
        require(self.machine is None, f"--machine {self.machine}: {sentence}")

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        super().check_checkpoint(checkpoint)
        has_biases = any(checkpoint.record["model"].get(name) for name in ("attention_bias", "mlp_bias"))
        sentence = "its model has biases, which this script does not split; resume it with tp-styles or hybrid"
        require(not has_biases, f"--resume {self.resume}: {sentence}")
