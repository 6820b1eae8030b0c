"""Where each rank stands when pipelines are replicated and layers are split: replica, stage, slice, neighbours."""

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distlab.settings import Layout


@dataclass(frozen=True)
class Grid:
    """A rank's place among `dp` replicas of a pipeline of `pp` stages, each of them split over `tp` ranks.

    Who talks most is next to each other in the order of ranks, so that most messages stay on one machine where they
    can: the ranks that share each layer, then the stages, which talk once a micro-batch, then the replicas, which talk
    once a step.

    Attributes:
        rank: of this process.
        dp: replicas.
        pp: stages of each.
        tp: ranks that hold slices of each stage.
    """

    rank: int
    dp: int
    pp: int
    tp: int = 1

    @classmethod
    def of(cls, rank: int, layout: Layout) -> "Grid":
        """A rank's place in a run's layout; what the layout leaves out is 1."""
        return cls(rank, layout.get("dp", 1), layout.get("pp", 1), layout.get("tp", 1))

    @property
    def replica(self) -> int:
        return self.rank // (self.pp * self.tp)

    @property
    def stage(self) -> int:
        return self.rank // self.tp % self.pp

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pp - 1

    def rank_of(self, stage: int) -> int:
        """The rank of the same slice of another stage of this replica's pipeline."""
        return self.rank + (stage - self.stage) * self.tp

    def describe(self, rank: int) -> str:
        """A rank as it is called in messages: "rank 4 (stage 1 of replica 1)"."""
        if self.pp == 1:
            return f"rank {rank}"
        place = replace(self, rank=rank)
        replica = f" of replica {place.replica}" if self.dp > 1 else ""
        return f"rank {rank} (stage {place.stage}{replica})"

    def groups(self, device_type: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The ranks that hold what this one holds, in all replicas, and the ranks that share this stage with it.

        Every rank must call it.
        """
        mesh = init_device_mesh(device_type, (self.dp, self.pp, self.tp), mesh_dim_names=("dp", "pp", "tp"))
        return mesh.get_group("dp"), mesh.get_group("tp")
