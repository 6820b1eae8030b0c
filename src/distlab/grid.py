"""Where each rank stands when pipelines are replicated: replica, stage, neighbours."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distlab.settings import Layout


@dataclass(frozen=True)
class Grid:
    """A rank's place among `dp` replicas of a pipeline of `pp` stages.

    Stages are neighbours in the order of ranks, so that the messages of each micro-batch stay on one machine where
    they can; replicas, which talk once a step, are `pp` ranks apart.

    Attributes:
        rank: of this process.
        dp: replicas.
        pp: stages of each.
    """

    rank: int
    dp: int
    pp: int

    @classmethod
    def of(cls, rank: int, layout: Layout) -> "Grid":
        """A rank's place in a run's layout; what the layout leaves out is 1."""
        return cls(rank, layout.get("dp", 1), layout.get("pp", 1))

    @property
    def replica(self) -> int:
        return self.rank // self.pp

    @property
    def stage(self) -> int:
        return self.rank % self.pp

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pp - 1

    def rank_of(self, stage: int) -> int:
        """The rank of another stage of this replica's pipeline."""
        return self.replica * self.pp + stage

    def describe(self, rank: int) -> str:
        """A rank as it is called in messages: "rank 4 (stage 1 of replica 1)"."""
        if self.pp == 1:
            return f"rank {rank}"
        replica = f" of replica {rank // self.pp}" if self.dp > 1 else ""
        return f"rank {rank} (stage {rank % self.pp}{replica})"

    def replicas_group(self, device_type: str) -> dist.ProcessGroup:
        """The process group of the ranks that hold this stage. Every rank must call it."""
        mesh = init_device_mesh(device_type, (self.dp, self.pp), mesh_dim_names=("dp", "pp"))
        return mesh.get_group("dp")
