"""A rank's coordinates in a layout of data, pipeline and tensor parallelism: its replica, stage and slice."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distlab.comm.devices import patient_threads
from distlab.comm.layout import Layout, Neighbors, name_stages, neighbors_of, pipelines_on_host
from distlab.comm.traffic import traffic


@dataclass(frozen=True)
class Grid:
    """A rank's position among `dp` replicas of a pipeline of `pp` stages, each split over `tp` ranks.

    Ranks that communicate most have neighboring numbers, so that most messages stay on one machine: first the ranks
    that share each layer, then the stages (a message per micro-batch), then the replicas (once per step). With
    `neighbors` "replicas", the replicas come before the stages. Then only activations cross the link between two
    machines, which are often fewer bytes than the gradients of all weights.
    """

    rank: int
    dp: int
    pp: int
    tp: int = 1
    held: Sequence[Sequence[int]] = ()  # by pipeline worker, the stages of the model on it, if these are several
    neighbors: Neighbors = "stages"

    @classmethod
    def of(cls, rank: int, layout: Layout, held: Sequence[Sequence[int]] = ()) -> "Grid":
        """A rank's position in a run's layout; a kind of parallelism that the layout does not name has size 1."""
        dp, pp, tp = (layout.get(kind, 1) for kind in ("dp", "pp", "tp"))
        return cls(rank, dp, pp, tp, held, neighbors_of(layout))

    @property
    def replica(self) -> int:
        return self.rank // self.tp % self.dp if self.neighbors == "replicas" else self.rank // (self.pp * self.tp)

    @property
    def stage(self) -> int:
        return self.rank // self._stride % self.pp

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pp - 1

    def rank_of(self, stage: int) -> int:
        """The rank with the same slice of another stage, in the same replica."""
        return self.rank + (stage - self.stage) * self._stride

    @property
    def _stride(self) -> int:
        """The difference between the ranks of neighboring stages."""
        return self.dp * self.tp if self.neighbors == "replicas" else self.tp

    def pipelines_on_host(self, ranks: int) -> int:
        """Of how many pipelines a host with so many ranks runs workers, each slice of a stage counting as one."""
        return pipelines_on_host(ranks, self.pp, self.dp * self.tp, self.neighbors)

    def describe(self, rank: int) -> str:
        """The name of a rank in messages: "rank 4 (stage 1 of replica 1)", "rank 0 (stages 0 and 3)"."""
        place = replace(self, rank=rank)
        if self.pp == 1:
            return f"rank {rank} (replica {place.replica})" if self.dp > 1 and self.tp > 1 else f"rank {rank}"
        replica = f" of replica {place.replica}" if self.dp > 1 else ""
        stages = self.held[place.stage] if self.held else [place.stage]
        return f"rank {rank} ({name_stages(stages)}{replica})"

    def mesh(self) -> DeviceMesh:
        """The ranks as a mesh with the dimensions "dp", "pp" and "tp"; `get_group` gives the group along each.

        The ranks along "dp" hold the same parameters as this one; those along "tp" share its stage. Every rank must
        call this method, after `init_process_group`. The groups use the deadline of `traffic`; with torch's
        `init_device_mesh` they would have torch's default of 30 minutes.

        Raises:
            TrafficError: a rank does not join the creation of the groups.
        """
        ranks = torch.arange(self.dp * self.pp * self.tp)
        if self.neighbors == "replicas":
            ranks = ranks.view(self.pp, self.dp, self.tp).movedim(0, 1)
        else:
            ranks = ranks.view(self.dp, self.pp, self.tp)
        timeout = traffic.group_timeout
        by_dim = [ranks.movedim(dim, -1).flatten(0, 1).tolist() for dim in range(3)]
        with traffic.named("all ranks to create the groups of replicas, stages and slices"), patient_threads():
            # Every rank must take part in creating every group, including those that it is not in.
            groups = [dist.new_subgroups_by_enumeration(of_dim, timeout=timeout)[0] for of_dim in by_dim]
        for of_replicas_or_shards in (groups[0], groups[2]):  # neighbors in a pipeline have their own channels
            traffic.connect(of_replicas_or_shards)
        return DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=("dp", "pp", "tp"))
