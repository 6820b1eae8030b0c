"""Each rank's place, and the groups that it is in."""

import re
import time
from datetime import timedelta
from multiprocessing.synchronize import Barrier

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, join, meeting_of, process_group, run_ranks

from distlab.axes.grid import Grid
from distlab.axes.layout import layout_flags, layout_size, pipelines_on_host
from distlab.comm.context import Options
from distlab.comm.waits import TrafficError
from distlab.rendezvous.groups import world_group

LAYOUTS: list[dict[str, int]] = [
    {"dp": 2, "pp": 2, "tp": 2}, {"pp": 3, "dp": 2, "tp": 1}, {"dp": 3}, {"xp": 3, "dp": 5}, {}
]  # fmt: skip


def test_ranks_and_layouts_are_named_by_what_they_have_several_of() -> None:
    assert Grid(0, {"dp": 2, "pp": 2, "tp": 2}).describe(7) == "rank 7 (stage 1 of replica 1)"
    assert Grid(0, {"pp": 2, "dp": 3, "tp": 2}).describe(9) == "rank 9 (stage 1 of replica 1)"
    assert Grid(0, {"dp": 2, "pp": 2}, [[0, 3], [1, 2]]).describe(3) == "rank 3 (stages 1 and 2 of replica 1)"
    assert Grid(0, {"pp": 2}, [[0, 3], [1, 2]]).describe(1) == "rank 1 (stages 1 and 2)"
    assert Grid(0, {"tp": 3}).describe(2) == Grid(0, {"dp": 3}).describe(2) == "rank 2"
    assert Grid(0, {"dp": 3, "pp": 1}).describe(2) == "rank 2", "as with one axis"
    assert Grid(0, {"dp": 2, "tp": 2}).describe(3) == "rank 3 (replica 1)"
    assert Grid(0, {"dp": 2, "pp": 2, "cp": 2}).describe(6) == "rank 6 (stage 1 of part 0 of replica 1)"
    assert Grid(0, {"xp": 3, "dp": 5}).describe(6) == "rank 6 (replica 1)"
    assert Grid(0, {"dp": 1, "pp": 2, "ep": 2}).describe(3) == "rank 3 (stage 1 of replica 1)"
    assert layout_flags({"dp": 2, "pp": 3, "ep": 2}) == "--dp 4 --ep 2 --pp 3", "--dp counts all replicas"
    assert layout_flags({"pp": 3, "tp": 2}) == "--pp 3 --tp 2"
    assert layout_flags({"pp": 2, "dp": 3, "tp": 2}) == "--dp 3 --pp 2 --tp 2 --neighbors replicas"
    assert layout_flags({"pp": 3}) == "--world-size 3"
    assert layout_flags({"dp": 2, "ep": 2}) == "--world-size 4"
    assert layout_flags({}) == "one process"


def test_ranks_that_are_left_keep_their_names() -> None:
    """A rank has its number in the layout, its stage and its replica, also if its number in the group is another."""
    grid = Grid(3, {"dp": 2, "pp": 2})
    of_stage, of_replica = grid.axis("dp"), grid.axis("pp")
    assert (of_stage.ranks, of_replica.ranks) == ((1, 3), (2, 3))
    grid.keep([0, 2, 3])
    assert (grid.rank, grid.size, of_stage.ranks, of_replica.ranks) == (2, 3, (2,), (1, 2))
    names = ["rank 0 (stage 0 of replica 0)", "rank 2 (stage 0 of replica 1)", "rank 3 (stage 1 of replica 1)"]
    assert [grid.describe(rank) for rank in range(3)] == names
    grid.keep([2, 3])  # a second death
    assert (grid.rank, grid.size, [grid.describe(rank) for rank in range(2)]) == (1, 2, names[1:])
    assert (grid.ranks_along(["pp"]), grid.ranks_along(["dp"])) == ([(0, 1)], [(0,), (1,)]), "groups of none are none"


@pytest.mark.parametrize(
    ("layout", "ranks", "expected"),
    [
        ({"pp": 2, "dp": 3, "tp": 2}, (12, 6, 2), [6, 6, 2]),
        ({"dp": 3, "pp": 2, "tp": 2}, (12, 8, 4, 2), [6, 4, 2, 2]),
        ({"dp": 2, "pp": 3}, (6, 5, 4, 3, 2, 1), [2, 2, 2, 1, 1, 1]),
        ({"dp": 5}, (5, 3), [5, 3]),
        ({}, (1,), [1]),
    ],
)
def test_a_host_runs_the_pipelines_of_which_it_has_ranks(
    layout: dict[str, int], ranks: tuple[int, ...], expected: list[int]
) -> None:
    assert [pipelines_on_host(layout, count) for count in ranks] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_along_an_axis_are_the_ranks_that_differ_there_only(layout: dict[str, int]) -> None:
    grids = [Grid(rank, layout) for rank in range(layout_size(layout))]
    for grid in grids:
        for name in (*layout, "cp"):
            axis = grid.axis(name)
            assert (axis.size, axis.ranks[axis.rank]) == (layout.get(name, 1), grid.rank)
            for number, other in enumerate(axis.ranks):
                assert grids[other].axis(name).rank == number
                assert all(grids[other].axis(apart).rank == grid.axis(apart).rank for apart in layout if apart != name)
        everywhere = grid.axis(*layout)
        assert everywhere.ranks == tuple(range(grid.size))
        assert everywhere.names == tuple(name for name, size in layout.items() if size > 1)
        for name in layout:
            assert everywhere.without(name) is grid.axis(*(other for other in layout if other != name))


def groups_of(rank: int, layout: dict[str, int], port: int) -> list[list[int]]:
    """The groups along each axis, and along all but the first."""
    with process_group(rank, layout_size(layout), port, timeout_seconds=77):
        grid, found = Grid(rank, layout), []
        if rank == 0 and len(layout) > 1:
            with pytest.raises(RuntimeError, match="make_groups"):
                _ = grid.axis(next(iter(layout))).group
        axes = [*((name,) for name in layout), tuple(layout)[1:]]
        grid.make_groups(*axes)
        before = [grid.axis(*names).group for names in axes]
        grid.make_groups(*axes)  # again, as after a failure
        for names, earlier in zip(axes, before, strict=True):
            group = grid.axis(*names).group
            found.append(dist.get_process_group_ranks(group or dist.group.WORLD))
            if group is not None and group.size() > 1:
                assert group is not earlier
                assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
        dist.barrier()  # rank 0 has the store that others may still need
        grid.keep(grid.alive)  # from now on without groups
        for names in axes:
            if 1 < grid.axis(*names).size < grid.size:
                with pytest.raises(RuntimeError, match="make_groups"):
                    _ = grid.axis(*names).group
        return found


def test_groups_are_those_of_the_layout_and_have_the_runs_deadline() -> None:
    assert run_ranks(8, groups_of, {"dp": 2, "pp": 2, "tp": 2}, free_port()) == [
        [[0, 4], [0, 2], [0, 1], [0, 1, 2, 3]], [[1, 5], [1, 3], [0, 1], [0, 1, 2, 3]],
        [[2, 6], [0, 2], [2, 3], [0, 1, 2, 3]], [[3, 7], [1, 3], [2, 3], [0, 1, 2, 3]],
        [[0, 4], [4, 6], [4, 5], [4, 5, 6, 7]], [[1, 5], [5, 7], [4, 5], [4, 5, 6, 7]],
        [[2, 6], [4, 6], [6, 7], [4, 5, 6, 7]], [[3, 7], [5, 7], [6, 7], [4, 5, 6, 7]],
    ]  # fmt: skip
    assert run_ranks(6, groups_of, {"pp": 3, "dp": 2, "tp": 1}, free_port()) == [
        [[0, 2, 4], [0, 1], [0], [0, 1]], [[1, 3, 5], [0, 1], [1], [0, 1]], [[0, 2, 4], [2, 3], [2], [2, 3]],
        [[1, 3, 5], [2, 3], [3], [2, 3]], [[0, 2, 4], [4, 5], [4], [4, 5]], [[1, 3, 5], [4, 5], [5], [4, 5]],
    ]  # fmt: skip
    assert run_ranks(3, groups_of, {"dp": 3}, free_port()) == [[[0, 1, 2], [rank]] for rank in range(3)]


def make_groups_without_rank_1(rank: int, port: int, end: Barrier) -> tuple[str, float, str]:
    join(rank, 4, port, options=Options(transport="gloo")).waits.timeout_seconds = 1
    world, said = world_group(), ("", 0.0, "")
    assert world is not None
    end.wait(20)
    if rank != 1:
        with pytest.raises(TrafficError, match=r" s for new_group, test_grid\.py line \d+: no answer"):
            dist.new_group(range(4))
        started = time.monotonic()
        with pytest.raises(TrafficError) as caught:
            Grid(rank, {"dp": 2, "tp": 2}).make_groups()
        seconds, found = time.monotonic() - started, world.notices.explain(caught.value)
        said = str(caught.value), seconds, found.sentence if found else ""
    end.wait(20)  # the store where the others still wait ends with rank 0
    return said


def test_a_rank_that_does_not_come_ends_the_others_at_the_deadline_with_a_sentence() -> None:
    by_rank = run_ranks(4, make_groups_without_rank_1, free_port(), meeting_of(4))
    for rank, (sentence, seconds, diagnosis) in enumerate(by_rank):
        if rank != 1:
            assert sentence.startswith(f"rank {rank} waited ")
            assert re.search(" s for all ranks to create the groups along (dp|tp):", sentence)  # rank 1 is in both
            assert sentence.endswith("no answer (init_process_group's timeout sets how long to wait)")
            assert seconds < 10
            assert diagnosis.startswith("rank 1 answers, but has not reached this point")
