"""Each rank's place, and the groups that it is in."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, process_group, run_ranks

from distlab.comm.grid import Grid
from distlab.comm.layout import layout_flags, layout_size
from distlab.comm.traffic import traffic
from distlab.comm.waits import TrafficError
from distlab.rendezvous.ranks import open_store


def test_ranks_that_share_a_stage_are_neighbors() -> None:
    places = [Grid.of(rank, {"dp": 2, "pp": 2, "tp": 2}) for rank in range(8)]
    assert [place.replica for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.stage for place in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [place.rank_of(1) for place in places] == [2, 3, 2, 3, 6, 7, 6, 7]
    assert places[0].describe(7) == "rank 7 (stage 1 of replica 1)"
    assert Grid.of(0, {"dp": 2, "pp": 2}, [[0, 3], [1, 2]]).describe(3) == "rank 3 (stages 1 and 2 of replica 1)"
    assert Grid.of(0, {"tp": 3}).describe(2) == "rank 2"
    assert Grid.of(0, {"dp": 2, "tp": 2}).describe(3) == "rank 3 (replica 1)"


def test_replicas_of_a_stage_can_be_neighbors() -> None:
    layout = {"pp": 2, "dp": 3, "tp": 2}
    places = [Grid.of(rank, layout) for rank in range(12)]
    assert [place.replica for place in places] == [0, 0, 1, 1, 2, 2] * 2
    assert [place.stage for place in places] == [0] * 6 + [1] * 6
    assert [place.rank_of(0) for place in places] == [*range(6)] * 2
    assert places[0].describe(9) == "rank 9 (stage 1 of replica 1)"
    assert [places[0].pipelines_on_host(ranks) for ranks in (12, 6, 2)] == [6, 6, 2]
    assert layout_flags(layout) == "--dp 3 --pp 2 --tp 2 --neighbors replicas"


def groups_of(rank: int, layout: dict[str, int], port: int) -> tuple[list[int], ...]:
    with process_group(rank, layout_size(layout), port):
        traffic.timeout_seconds = 77
        mesh = Grid.of(rank, layout).mesh()
        groups = [mesh.get_group(name) for name in ("dp", "pp", "tp")]
        for group in groups:
            gloo = group._get_backend(torch.device("cpu"))
            assert gloo.options._timeout == timedelta(seconds=77)
        return tuple(map(dist.get_process_group_ranks, groups))


def test_groups_are_those_of_the_layout_and_have_the_runs_deadline() -> None:
    assert run_ranks(8, groups_of, {"dp": 2, "pp": 2, "tp": 2}, free_port()) == [
        ([0, 4], [0, 2], [0, 1]), ([1, 5], [1, 3], [0, 1]), ([2, 6], [0, 2], [2, 3]), ([3, 7], [1, 3], [2, 3]),
        ([0, 4], [4, 6], [4, 5]), ([1, 5], [5, 7], [4, 5]), ([2, 6], [4, 6], [6, 7]), ([3, 7], [5, 7], [6, 7]),
    ]  # fmt: skip
    assert run_ranks(6, groups_of, {"pp": 3, "dp": 2, "tp": 1}, free_port()) == [
        ([0, 1], [0, 2, 4], [0]), ([0, 1], [1, 3, 5], [1]), ([2, 3], [0, 2, 4], [2]),
        ([2, 3], [1, 3, 5], [3]), ([4, 5], [0, 2, 4], [4]), ([4, 5], [1, 3, 5], [5]),
    ]  # fmt: skip
    assert run_ranks(3, groups_of, {"dp": 3}, free_port()) == [([0, 1, 2], [rank], [rank]) for rank in range(3)]


def make_groups_without_rank_1(rank: int, port: int) -> tuple[str, float]:
    store = open_store(rank, "localhost", port, 30, lambda _: None)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    traffic.timeout_seconds = 1
    if rank == 1:
        time.sleep(3)
        return "", 0
    started = time.monotonic()
    with pytest.raises(TrafficError) as caught:
        Grid(rank, dp=2, pp=1, tp=2).mesh()
    seconds = time.monotonic() - started
    time.sleep(1)  # the store where the others still wait ends with rank 0
    return str(caught.value), seconds


def test_a_rank_that_does_not_come_ends_the_others_at_the_deadline_with_a_sentence() -> None:
    for rank, (sentence, seconds) in enumerate(run_ranks(4, make_groups_without_rank_1, free_port())):
        if rank != 1:
            assert sentence.startswith(f"rank {rank} waited ")
            assert " s for all ranks to create the groups of replicas, stages and slices" in sentence
            assert sentence.endswith("no answer (--timeout sets how long to wait)")
            assert seconds < 10
