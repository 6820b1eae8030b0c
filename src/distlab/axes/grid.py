"""A rank's coordinates in a layout, and the ranks along each of its axes."""

from collections.abc import Collection, Sequence
from functools import cached_property

import torch.distributed as dist

from distlab.axes.layout import Layout, describe_rank, layout_size, ranks_along
from distlab.comm.context import Group, context_if_any, during


class Axis:
    """The ranks that differ from this one along some axes of a layout only.

    Attributes:
        names: the axes, in the order of the layout; axes of size 1 are left out.
        rank: this rank's number among these ranks, from 0.
    """

    def __init__(self, grid: "Grid", names: tuple[str, ...]) -> None:
        self._grid, self.names, self.layout = grid, names, grid.layout
        self._group: Group = None

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of these ranks in the process group of all, in the order of the layout."""
        return next(ranks for ranks in self._grid.ranks_along(self.names) if self._grid.rank in ranks)

    def forget(self) -> None:
        """Find the ranks again when they are asked for, and leave their group."""
        vars(self).pop("ranks", None)
        self._group = None

    @property
    def rank(self) -> int:
        return self.ranks.index(self._grid.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def group(self) -> Group:
        """The process group of these ranks that `Grid.make_groups` made last; None if they are all ranks.

        Raises:
            RuntimeError: there is no such group.
        """
        if self.size == 1 < self._grid.size and self._group is None:  # no other rank has to take part
            self._group = dist.new_group([self._grid.rank], use_local_synchronization=True)
        if self._group is None and self.size < self._grid.size:
            raise RuntimeError(f"there is no group along {self}: all ranks must call Grid.make_groups for it first")
        return self._group

    def without(self, *names: str) -> "Axis":
        """Return the ranks among these that do not differ along `names`."""
        return self._grid.axis(*(name for name in self.names if name not in names))

    def make_group(self) -> None:
        """Make a process group of these ranks, in place of any earlier one; all ranks of the layout must call this."""
        groups = [list(ranks) for ranks in self._grid.ranks_along(self.names)]
        if all(len(ranks) in (1, self._grid.size) for ranks in groups):
            return
        context = context_if_any()
        with during(f"all ranks to create the groups along {self}"):
            # Every rank must take part in creating every group, including those that it is not in.
            timeout = context.group_timeout if context else None
            self._group, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout)
        from distlab.comm.group import connect_nccl  # here, because one process has no use for it

        connect_nccl(self._group)

    def __str__(self) -> str:
        return " x ".join(self.names)


class Grid:
    """A rank's position in a layout.

        grid = Grid(rank, {"dp": 2, "pp": 3, "tp": 2})
        grid.make_groups("dp", "tp")
        grid.axis("tp").rank, grid.axis("tp").size, grid.axis("tp").group

    The ranks along the last axis are neighbors, so the axis whose ranks communicate most comes last and most messages
    stay on one machine: usually the slices of a layer, before them the stages (a message per micro-batch), and first
    the replicas (once per step). With the stages first, only activations cross the link between two machines; they are
    often fewer bytes than the gradients of all weights.

    Args:
        rank: this rank's number in the layout.
        layout: the axes and their sizes.
        stages: by pipeline worker, the stages of the model on it, if there are several.

    Attributes:
        alive: the numbers in the layout of the ranks that are left, in the order of their process group.
        rank: its number among these, which is its number in their process group.
        size: number of the ranks that are left.
    """

    def __init__(self, rank: int, layout: Layout, stages: Sequence[Sequence[int]] = ()) -> None:
        self.alive: Sequence[int] = range(layout_size(layout))
        self.rank, self.layout, self._stages = self.alive.index(rank), layout, stages
        self.size = len(self.alive)
        self._axes: dict[tuple[str, ...], Axis] = {}

    def axis(self, *names: str) -> Axis:
        """Return the ranks along one or several axes; an axis that the layout lacks has this rank only."""
        known = tuple(name for name, size in self.layout.items() if name in names and size > 1)
        return self._axes.setdefault(known, Axis(self, known))

    def keep(self, alive: Sequence[int]) -> None:
        """From now on, consist of the ranks that are left, given by their numbers in the layout.

        So do axes that are already held; their groups have to be made again.
        """
        rank = self.alive[self.rank]
        self.alive, self.rank, self.size = alive, alive.index(rank), len(alive)
        for axis in self._axes.values():
            axis.forget()

    def ranks_along(self, axes: Collection[str]) -> list[tuple[int, ...]]:
        """Return all ranks that are left in groups, as the function does; some groups may have lost ranks."""
        numbers = {rank: number for number, rank in enumerate(self.alive)}
        groups = [tuple(numbers[rank] for rank in ranks if rank in numbers) for ranks in ranks_along(self.layout, axes)]
        return [ranks for ranks in groups if ranks]

    def make_groups(self, *axes: str | tuple[str, ...]) -> None:
        """Make the process groups along axes, each a name or several; by default, along each axis of the layout.

        Every rank must call this, with the same axes, after `init_process_group`. An axis that has a group gets a new
        one, also where the `Axis` is already held.

        Raises:
            TrafficError: a rank does not join the creation of the groups.
        """
        named = [self.axis(*([names] if isinstance(names, str) else names)) for names in axes or self.layout]
        for axis in dict.fromkeys(named):  # several may be the same, where a layout lacks axes
            axis.make_group()

    def describe(self, rank: int) -> str:
        """Return the name of a rank in messages: "rank 4 (stage 1 of replica 1)", "rank 0 (stages 0 and 3)"."""
        return describe_rank(self.layout, self.alive[rank], self._stages)


def all_ranks(name: str) -> Axis:
    """Return all ranks of the process group as an axis of this name."""
    return Grid(dist.get_rank(), {name: dist.get_world_size()}).axis(name)
