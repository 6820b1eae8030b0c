"""The closed formulas are what the simulated world takes."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.planner_machines import MODEL, cluster

from distlab.collectives.ring import allreduce_ring
from distlab.collectives.simulation import SimulatedWorld
from distlab.comm import context
from distlab.comm.link import Link
from distlab_planner.collective_model import CostModel, predict_collective
from distlab_planner.communication_seconds import (
    SMALLEST_OF_HOSTS_BYTES,
    SMALLEST_SHARED_BYTES,
    CollectiveSeconds,
    RanksOnHosts,
    Spread,
    one_after_another,
)
from distlab_planner.layouts import SAME_WEIGHTS, RunLayout
from distlab_planner.machine import AllReduce

near: Any = pytest.approx
REPLICAS = ("dp",)
SLOW, FAST = Link(5e-5, 1e9), Link(1e-6, 1e11)


def placement(ranks: int, per_host: int, pp: int = 1, tp: int = 1, **machine: object) -> RanksOnHosts:
    layout = RunLayout(
        {"dp": ranks // (pp * tp), "pp": pp, "tp": tp}, 1, 1, "dapple", "none", "none", (MODEL.n_layers,)
    )
    machine = {"inside": FAST, "between": SLOW} | machine
    return RanksOnHosts(cluster(hosts=-(-ranks // per_host), ranks_per_host=per_host, **machine), layout)


@pytest.mark.parametrize(("ranks", "size_bytes"), [(2, 768), (2, 1_536_000), (3, 768), (8, 1_536_000), (64, 76_800)])
def test_an_all_reduce_between_equal_hosts_takes_what_the_simulated_world_takes(ranks: int, size_bytes: int) -> None:
    costs = CostModel(SLOW, math.inf, math.inf, one_card=True)
    simulated = predict_collective("all-reduce", "ring", size_bytes, ranks, costs).makespan
    on_hosts = placement(ranks, 1)
    assert on_hosts.all_reduce(REPLICAS, size_bytes).seconds == near(simulated, rel=1e-6)
    assert on_hosts.half(REPLICAS, size_bytes).seconds == near(simulated / 2, rel=1e-6)


@pytest.mark.parametrize(("ranks", "per_host"), [(8, 4), (16, 2), (3, 2), (5, 2), (7, 4)])
def test_the_slowest_link_of_a_ring_decides(ranks: int, per_host: int) -> None:
    """Also where hosts have unequal numbers of ranks."""
    links = {(r, s): SLOW for r in range(ranks) for s in range(ranks) if r // per_host != s // per_host}
    tensor = torch.empty(ranks * 200_000, device="meta")  # chunks of less than a segment
    world = SimulatedWorld(ranks, FAST, links, one_card=True)
    world.run(lambda endpoint: allreduce_ring(tensor.clone(), endpoint=endpoint))
    seconds = placement(ranks, per_host).all_reduce(REPLICAS, tensor.nbytes).seconds
    assert seconds == pytest.approx(world.makespan, rel=0.1)


def test_rings_that_leave_a_host_together_share_its_card() -> None:
    alone = placement(4, 2).all_reduce(REPLICAS, 4e9).seconds
    of_slices = placement(4, 2, tp=2)
    assert of_slices.all_reduce(REPLICAS, 4e9).seconds == pytest.approx(alone * 4 / 3, rel=1e-3)
    # Two messages, each of a half; of a small tensor, latency counts as much.
    assert of_slices.all_reduce(REPLICAS, 1e5).seconds == pytest.approx(2 * SLOW.seconds(2 * 5e4))


def test_the_worst_group_decides_where_some_begin_on_one_host_and_end_on_the_next() -> None:
    """Hosts of 8 ranks: ranks 6 to 8 share layers, and so do 15 to 17. Host 1 sends for both."""
    slices = placement(24, 8, tp=3)
    assert not slices.is_inside(("tp",))
    assert slices.spread(("tp",)) == Spread(on_host=3, hosts=2, leaving=2)
    assert slices.all_reduce(("tp",), 3e6).seconds == pytest.approx(SLOW.seconds(4 * 2 * 1e6))  # 4 messages
    even = placement(24, 6, tp=3)
    assert even.is_inside(("tp",))
    assert even.all_reduce(("tp",), 3e6).seconds == pytest.approx(4 * FAST.seconds(1e6))
    # Replicas of three ranks: all that share a stage are on several hosts; a host has at most three of them.
    assert slices.spread(REPLICAS) == Spread(on_host=3, hosts=3, leaving=3)


def test_the_replica_whose_messages_cross_the_network_decides() -> None:
    """Pipelines of three on hosts of four: of the second one, the first stage is on the first host."""
    two = placement(6, 4, pp=3)
    assert two.message(0, 1, 1e6) == SLOW.seconds(1e6)
    assert two.message(1, 0, 1e6) == SLOW.seconds(1e6)
    assert two.message(1, 2, 1e6) == FAST.seconds(1e6)
    assert [two.alike(worker) for worker in range(3)] == [2, 1, 1], "the first host has two first stages"
    assert placement(24, 8, tp=3).alike(0) == 8


def test_ranks_with_other_parts_of_sequences_average_with_the_replicas() -> None:
    """Replicas of two stages with two parts each: ranks 0, 1, 4 and 5 have the same weights."""
    layout = RunLayout({"dp": 2, "pp": 2, "cp": 2}, 1, 1, "dapple", "none", "none", (2, 2))
    one, two, apart = (RanksOnHosts(cluster(hosts=8, ranks_per_host=per_host), layout) for per_host in (8, 2, 1))
    assert one.is_inside(SAME_WEIGHTS)
    assert two.spread(SAME_WEIGHTS) == Spread(on_host=2, hosts=2, leaving=1)
    assert two.is_inside(("cp",))
    assert not apart.is_inside(("cp",))
    sharing = RanksOnHosts(cluster(hosts=8, ranks_per_host=1), replace(layout, axes={"dp": 2, "pp": 2, "ep": 2}))
    assert not sharing.is_inside(("ep",))


def test_what_was_measured_inside_a_host_replaces_the_formula() -> None:
    entries = (AllReduce(2, "gloo", (1e5, 1e6), (1e-3, 2e-3)), AllReduce(2, "shared", (1e6, 2e6), (1e-3, 2e-3)))
    machine: dict[str, Any] = {"all_reduces": entries, "slowdown": (1.0, 1.25)}
    two, four = (placement(ranks, ranks, **machine) for ranks in (2, 4))
    assert two.all_reduce(REPLICAS, 1e6) == CollectiveSeconds(near(2e-3), near(2e-3 / 1.25), True)
    assert two.all_reduce(REPLICAS, 1e3).seconds == near(1e-3), "less takes as long as the least"
    two_numbers = (*entries, AllReduce(4, "gloo", (1e5, 1e6), (9e-3, 18e-3)))
    for ranks, seconds in {2: 2e-3, 4: 18e-3, 5: 18e-3 * 4 / 3 * (1 - 0.5 * 2e5 / 9e5)}.items():
        found = placement(ranks, 8, **machine | {"all_reduces": two_numbers}).all_reduce(REPLICAS, 1e6)
        assert found.seconds == near(seconds), "from the nearest number of ranks that was measured"
    # Four ranks send three times as many messages; those of a tensor of 1 MB are as long as two ranks' of 0.5 MB.
    assert four.all_reduce(REPLICAS, 1e6).seconds == near(3 * (1 + 4 / 9) * 1e-3)
    shared = two.all_reduce(REPLICAS, 1e6, "shared")
    assert shared == CollectiveSeconds(near(1e-3), near(1e-3 / 1.25), False)
    assert two.all_reduce(REPLICAS, 999, "shared") == two.all_reduce(REPLICAS, 999)
    half = two.half(REPLICAS, 2e6, "shared")
    seconds = (2e-3 + 1e-3) / 2  # half of the bytes, but the time to meet, in which the least is reduced, is whole
    assert half == CollectiveSeconds(near(seconds), near(seconds / 1.25), False)
    both = one_after_another([half, two.half(REPLICAS, 1e6)])
    assert (both.seconds, both.overlaps) == (near(half.seconds + 1e-3), False), "only if both can"
    across = placement(2, 1, **machine).all_reduce(REPLICAS, 1e6, "shared")
    assert across.overlaps
    assert across.seconds == pytest.approx(2 * SLOW.seconds(5e5))


def test_messages_of_several_replicas_of_a_host_take_what_so_many_took_at_once() -> None:
    together = Link(2e-5, 5e9), Link(3e-5, 4e9)
    links = {1: FAST, 2: together[0], 3: together[1], 4: together[1]}  # of more, what the most that were measured took
    for replicas, link in links.items():
        one_host = placement(2 * replicas, 8, pp=2, inside_together=together)
        assert one_host.message(0, 1, 1e6) == link.seconds(1e6)
        assert one_host.carrying(0, 1, 1e6) == 1e6 / link.bytes_per_second
    assert placement(4, 2, pp=2, tp=2, inside_together=together).message(0, 1, 1e6) == SLOW.seconds(2e6)


def test_both_ends_of_a_message_in_a_ring_handle_it() -> None:
    ring = placement(4, 4, message_seconds=1e-3)
    assert ring.message_in_ring(REPLICAS, 1e6) == near(FAST.seconds(1e6) + 2e-3)
    assert placement(4, 2, tp=2).message_in_ring(REPLICAS, 1e6) == near(SLOW.seconds(2e6)), "two share a card"


def test_the_ranks_of_a_host_stand_for_each_other() -> None:
    one_host = placement(8, 8, pp=2, tp=2)
    assert [one_host.host_of(worker) for worker in (0, 1)] == [0, 0]
    assert one_host.alike(0) == 4  # two replicas of two slices
    assert one_host.message(0, 1, 1e6) == FAST.seconds(1e6)
    two_hosts = placement(4, 2, pp=2, tp=2)
    assert [two_hosts.host_of(worker) for worker in (0, 1)] == [0, 1]
    assert two_hosts.message(0, 1, 1e6) == SLOW.seconds(2e6)
    pipelines = placement(4, 2, pp=2)  # one on each host
    assert not pipelines.is_inside(REPLICAS)


def test_pipelines_divided_between_hosts_average_inside_each() -> None:
    layout = RunLayout({"pp": 2, "dp": 2}, 1, 1, "dapple", "none", "none", (2, 2))
    two_hosts = RanksOnHosts(cluster(hosts=2, ranks_per_host=2, inside=FAST, between=SLOW), layout)
    assert [two_hosts.host_of(worker) for worker in (0, 1)] == [0, 1]
    assert (two_hosts.alike(0), two_hosts.pipelines) == (2, 2)
    assert two_hosts.message(0, 1, 1e6) == SLOW.seconds(2e6)  # both pipelines use the link
    assert two_hosts.all_reduce(REPLICAS, 4e9).seconds == pytest.approx(2 * FAST.seconds(2e9))


def test_ranks_that_share_the_memory_of_their_hosts_send_a_tensor_once_from_each_host() -> None:
    shared = (AllReduce(2, "shared", (1e6, 4e6), (1e-3, 4e-3)),)
    four = placement(4, 2, all_reduces=shared)
    whole = four.all_reduce(REPLICAS, 4e6, "shared")
    assert whole.overlaps
    assert whole.seconds == pytest.approx(4e-3 + 2 * SLOW.seconds(2e6))
    assert four.all_reduce(REPLICAS, 4e6).seconds == pytest.approx(placement(4, 2).all_reduce(REPLICAS, 4e6).seconds)
    # A reduce-scatter or an all-gather is a ring of all ranks, and small tensors stay with gloo.
    assert four.half(REPLICAS, 4e6, "shared").seconds == pytest.approx(four.half(REPLICAS, 4e6).seconds)
    assert four.all_reduce(REPLICAS, 1e3, "shared").seconds == four.all_reduce(REPLICAS, 1e3).seconds
    # With two slices, each on both hosts, nothing can be summed inside; with two groups on a host, they share its card.
    slices = placement(4, 2, tp=2, all_reduces=shared)
    assert slices.all_reduce(REPLICAS, 4e6, "shared").seconds == slices.all_reduce(REPLICAS, 4e6).seconds
    eight = placement(8, 4, tp=2, all_reduces=shared)
    assert eight.all_reduce(REPLICAS, 4e6, "shared").seconds == pytest.approx(4e-3 + 2 * SLOW.seconds(4e6))


def test_rows_are_exchanged_in_memory_or_in_messages_and_over_the_card_of_a_host() -> None:
    messages = placement(4, 4)
    assert messages.all_to_all(REPLICAS, 4e6) == messages.half(REPLICAS, 4e6)
    memory = placement(4, 4, all_reduces=(AllReduce(4, "shared", (1e6, 4e6), (1e-3, 4e-3)),))
    assert memory.all_to_all(REPLICAS, 4e6) == memory.all_reduce(REPLICAS, 4e6, "shared")
    assert memory.all_to_all(REPLICAS, 4e6).seconds == pytest.approx(4e-3)
    # A part for the other rank of the host, and two for those of the other host, while that rank sends two as well.
    across = placement(4, 2).all_to_all(REPLICAS, 4e6)
    assert across.seconds == pytest.approx(FAST.seconds(1e6) + 2 * SLOW.seconds(2e6))


def test_the_planner_shares_memory_where_runs_do() -> None:
    assert context.SMALLEST_SHARED_BYTES == SMALLEST_SHARED_BYTES
    assert context.SMALLEST_OF_HOSTS_BYTES == SMALLEST_OF_HOSTS_BYTES
