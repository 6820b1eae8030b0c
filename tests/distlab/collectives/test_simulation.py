"""The simulated world: copies, a virtual clock, deadlocks that name their cycle, exceptions that reach the caller."""

import math
import os
import threading

import pytest
import torch
from torch import Tensor

from distlab.collectives.algorithms import allreduce_ring, broadcast_naive, broadcast_ring, broadcast_tree
from distlab.collectives.simulation import Deadlock, HalfMessage, Link, SimulatedEndpoint, SimulatedWorld

usable_cores = getattr(os, "sched_getaffinity", id)  # which some systems lack
CORES = usable_cores(0)  # before any test of this process


def test_messages_are_copies_and_ranks_know_who_they_are() -> None:
    def pass_on(endpoint: SimulatedEndpoint) -> tuple[int, int, list[float]]:
        rank = endpoint.get_rank()
        tensor = torch.full((2,), float(rank))
        if rank == 0:
            endpoint.send(tensor, 1)
            tensor += 100
        elif rank == 1:
            endpoint.recv(tensor, 0)
            tensor += 1
        endpoint.barrier()
        return endpoint.get_rank(), endpoint.get_world_size(), tensor.tolist()

    assert SimulatedWorld(3).run(pass_on) == [(0, 3, [100, 100]), (1, 3, [1, 1]), (2, 3, [2, 2])]


def test_two_ranks_that_send_first_are_a_deadlock_at_once() -> None:
    def both_send(endpoint: SimulatedEndpoint) -> None:
        rank = endpoint.get_rank()
        endpoint.send(torch.ones(1), 1 - rank)
        endpoint.recv(torch.ones(1), 1 - rank)

    threads = threading.active_count()
    with pytest.raises(Deadlock, match="rank 0 waits to send to rank 1; rank 1 waits to send to rank 0"):
        SimulatedWorld(2).run(both_send)
    assert threading.active_count() <= threads
    assert (usable_cores(0), threading.stack_size()) == (CORES, 0), "as they were before"


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        ({0: 3, 1: 2, 2: 1}, "rank 1 waits for a message from rank 2; rank 2 waits for a message from rank 1"),
        ({0: 2, 1: 2, 2: 1}, "rank 1 waits for a message from rank 2; rank 2 waits for a message from rank 1"),
        ({0: 1, 1: None, 2: None}, "rank 0 waits for a message from rank 1; rank 1 waits in the barrier"),
    ],
)
def test_a_cycle_is_named_wherever_it_is_and_through_the_barrier(sources: dict[int, int | None], sentence: str) -> None:
    def wait(endpoint: SimulatedEndpoint) -> None:
        source = sources.get(endpoint.get_rank(), 3)
        if source is None:
            endpoint.barrier()
        elif endpoint.get_rank() < 3:
            endpoint.recv(torch.ones(1), source)

    with pytest.raises(Deadlock, match=f"^deadlock: {sentence}$"):
        SimulatedWorld(4).run(wait)


def test_a_cycle_of_a_thousand_ranks() -> None:
    with pytest.raises(Deadlock, match=r"rank 1023 waits for a message from rank 0$"):
        SimulatedWorld(1024).run(lambda endpoint: endpoint.recv(torch.ones(1), (endpoint.get_rank() + 1) % 1024))


def test_a_rank_that_leaves_others_waiting_is_a_deadlock() -> None:
    with pytest.raises(Deadlock, match="rank 1 waits in the barrier; rank 2 waits in the barrier"):
        SimulatedWorld(3).run(lambda endpoint: endpoint.get_rank() and endpoint.barrier())


def test_all_ranks_meet_in_each_barrier() -> None:
    def work(endpoint: SimulatedEndpoint) -> None:
        for seconds in (endpoint.get_rank(), 2 - endpoint.get_rank()):
            endpoint.compute(seconds)
            endpoint.barrier()

    world = SimulatedWorld(3)
    world.run(work)
    assert world.seconds == [4, 4, 4]


def test_exceptions_reach_the_caller() -> None:
    def fail(endpoint: SimulatedEndpoint) -> None:
        if endpoint.get_rank() == 2:
            raise KeyError("lost")
        endpoint.barrier()

    with pytest.raises(KeyError, match="lost"):
        SimulatedWorld(3).run(fail)


def seconds(size: int, link: Link, collective: object, elements: int) -> float:
    world = SimulatedWorld(size, link)
    world.run(lambda endpoint: collective(torch.ones(elements), 0, endpoint))  # type: ignore[operator]
    return world.makespan


def test_the_clock_gives_the_formulas() -> None:
    link = Link(latency_seconds=1.0, bytes_per_second=4.0)  # a message of one element takes 2 seconds
    assert seconds(8, link, broadcast_naive, 1) == pytest.approx(7 * 2)
    assert seconds(8, link, broadcast_tree, 1) == pytest.approx(3 * 2)
    assert seconds(8, link, broadcast_ring, 1) == pytest.approx(7 * 2)
    world = SimulatedWorld(4, link)
    world.run(lambda endpoint: allreduce_ring(torch.ones(80), endpoint=endpoint, both_ways_bytes=0))
    assert world.makespan == pytest.approx(6 * (1 + 10))  # six turns of two messages at a time, of ten elements each


def test_a_message_sets_out_when_it_does_whatever_others_compute() -> None:
    world = SimulatedWorld(3, Link(latency_seconds=1.0, bytes_per_second=4.0))

    def work(endpoint: SimulatedEndpoint) -> None:
        rank = endpoint.get_rank()
        if rank == 2:
            endpoint.compute(2.0)
        else:
            (endpoint.recv if rank else endpoint.send)(torch.ones(10), 1 - rank)

    world.run(work)
    assert world.seconds == [11.0, 11.0, 2.0]


def test_a_slow_link_costs_what_it_costs() -> None:
    world = SimulatedWorld(3, Link(1.0), links={(0, 2): Link(10.0)}, keep_messages=True)
    world.run(lambda endpoint: broadcast_naive(torch.ones(1), 0, endpoint))
    assert world.seconds == [11.0, 1.0, 11.0]
    assert world.messages == [(0, 1, 4, 0.0, 1.0), (0, 2, 4, 1.0, 11.0)], "each with its start and its end"


def test_a_thousand_ranks() -> None:
    assert seconds(1024, Link(1.0), broadcast_tree, 4) == pytest.approx(10)


def test_what_gloo_refuses_is_refused() -> None:
    for sent, received, sentence in (
        (torch.ones(2), torch.ones(3), "rank 0 sends 8 bytes of torch.float32 and rank 1 receives 12"),
        (torch.ones(2), torch.ones(2, dtype=torch.int32), "of torch.float32 and rank 1 receives 8 of torch.int32"),
        (torch.ones(2, 2).T, torch.ones(2, 2), "not contiguous"),
    ):

        def exchange(endpoint: SimulatedEndpoint, sent: Tensor = sent, received: Tensor = received) -> None:
            if endpoint.get_rank() == 0:
                endpoint.send(sent, 1)
            else:
                endpoint.recv(received, 0)

        with pytest.raises(ValueError, match=sentence):
            SimulatedWorld(2).run(exchange)


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_rank_exchanges_messages_with_the_other_ranks_only(peer: int) -> None:
    with pytest.raises(ValueError, match=f"rank 0 cannot exchange a message with rank {peer} in a world of 2"):
        SimulatedWorld(2).run(lambda endpoint: endpoint.get_rank() or endpoint.isend(torch.ones(1), peer))


def test_a_message_arrives_when_its_time_has_come_and_not_before() -> None:
    def early(endpoint: SimulatedEndpoint) -> list[float]:
        rank = endpoint.get_rank()
        if rank == 0:
            endpoint.send(torch.ones(1), 1)
            return []
        tensor = torch.zeros(1)
        arriving = endpoint.irecv(tensor, 0)
        before = tensor.item()
        arriving.wait()
        return [before, tensor.item()]

    assert SimulatedWorld(2, Link(1.0)).run(early)[1] == [0.0, 1.0]


@pytest.mark.parametrize("goes_out", [True, False])
def test_one_card_is_shared_by_what_goes_out_or_comes_in_at_the_same_time(goes_out: bool) -> None:
    def exchange(endpoint: SimulatedEndpoint) -> None:
        others = (1, 2, 3) if endpoint.get_rank() == 0 else (0,)
        begin = endpoint.isend if goes_out == (endpoint.get_rank() == 0) else endpoint.irecv
        for message in [begin(torch.ones(1), other) for other in others]:
            message.wait()

    for one_card, expected in ((False, 1.0), (True, 3.0)):
        world = SimulatedWorld(4, Link(0.0, 4.0), one_card=one_card)
        world.run(exchange)
        assert world.makespan == pytest.approx(expected)


def test_a_world_runs_once() -> None:
    world = SimulatedWorld(2)
    world.run(lambda _: None)
    with pytest.raises(RuntimeError, match="runs once"):
        world.run(lambda _: None)


@pytest.mark.parametrize(
    ("is_send", "sentence"),
    [
        (True, "rank 0 began to send to rank 1, which never received it"),
        (False, "rank 0 began to receive from rank 1, which never sent anything"),
    ],
)
def test_half_a_message_is_reported_at_the_end(is_send: bool, sentence: str) -> None:
    def begin(endpoint: SimulatedEndpoint) -> None:
        if endpoint.get_rank() == 0:
            (endpoint.isend if is_send else endpoint.irecv)(torch.ones(1), 1)
        endpoint.barrier()

    with pytest.raises(HalfMessage, match=f"^{sentence}$"):
        SimulatedWorld(2).run(begin)


def test_messages_match_by_their_tags() -> None:
    def exchange(endpoint: SimulatedEndpoint) -> list[float]:
        rank = endpoint.get_rank()
        tensors = [torch.full((1,), 10.0 * rank + tag) for tag in (0, 1)]
        tags = (0, 1) if rank == 0 else (1, 0)
        call = endpoint.isend if rank == 0 else endpoint.irecv
        for message in [call(tensors[tag], 1 - rank, tag=tag) for tag in tags]:
            message.wait()
        return [tensor.item() for tensor in tensors]

    assert SimulatedWorld(2).run(exchange) == [[0.0, 1.0], [0.0, 1.0]]

    def miss(endpoint: SimulatedEndpoint) -> None:
        rank = endpoint.get_rank()
        (endpoint.send if rank == 0 else endpoint.recv)(torch.ones(1), 1 - rank, tag=2 + rank)

    with pytest.raises(Deadlock, match="to send to rank 1 with tag 2; rank 1 waits for a message from rank 0 with tag"):
        SimulatedWorld(2).run(miss)


def test_messages_on_one_link_share_its_bandwidth() -> None:
    def give(endpoint: SimulatedEndpoint) -> None:
        rank = endpoint.get_rank()
        begin, sizes = endpoint.isend if rank == 0 else endpoint.irecv, (250_000, 750_000)
        for message in [begin(torch.zeros(size), 1 - rank) for size in sizes]:
            message.wait()

    world = SimulatedWorld(2, Link(0, 1e9), keep_messages=True)
    world.run(give)
    assert [passed.ended_seconds for passed in world.messages] == pytest.approx([2e-3, 4e-3])
    ring = SimulatedWorld(4, Link(0, 1e9))
    ring.run(lambda endpoint: allreduce_ring(torch.zeros(10_000_000, device="meta"), endpoint=endpoint))
    assert ring.makespan == pytest.approx(2 * 3 / 4 * 0.04), "in segments, too, 2 (n - 1) / n of the tensor goes"


def test_a_computer_that_moves_so_many_bytes_needs_no_bandwidth_of_its_links() -> None:
    world = SimulatedWorld(2, Link(1e-3), shared_bytes_per_second=1e9)
    world.run(lambda endpoint: broadcast_naive(torch.zeros(250_000), 0, endpoint))
    assert world.makespan == pytest.approx(2e-3)


def test_the_more_messages_are_under_way_the_more_they_hinder_each_other() -> None:
    def seconds(pairs: int) -> float:
        world = SimulatedWorld(6, Link(0, 1e9), shared_bytes_per_second=2e9)

        def give(endpoint: SimulatedEndpoint) -> None:
            rank = endpoint.get_rank()
            if rank < pairs:
                endpoint.send(torch.zeros(250_000), 3 + rank)
            elif 3 <= rank < 3 + pairs:
                endpoint.recv(torch.zeros(250_000), rank - 3)

        world.run(give)
        return world.makespan

    # A message of 1 MB takes 1 ms alone, and one from each of six ranks would take 3 ms: 0.4 ms for each further one.
    assert [seconds(pairs) for pairs in (1, 2, 3)] == pytest.approx([1e-3, 1.4e-3, 1.8e-3])


def test_where_links_are_slower_than_the_computer_messages_do_not_hinder_each_other() -> None:
    """However many are under way: here, three each way between two ranks."""

    def exchange(endpoint: SimulatedEndpoint) -> None:
        other = 1 - endpoint.get_rank()
        started = [endpoint.irecv(torch.zeros(250), other) for _ in range(3)]
        started += [endpoint.isend(torch.zeros(250), other) for _ in range(3)]
        for message in started:
            message.wait()

    for shared in (math.inf, 1e7):
        world = SimulatedWorld(2, Link(0, 1e6), shared_bytes_per_second=shared)
        world.run(exchange)
        assert world.makespan == pytest.approx(3e-3)


def test_ranks_that_compute_at_the_same_time_share_the_cores() -> None:
    world = SimulatedWorld(4, ranks_at_once=2)
    world.run(lambda endpoint: endpoint.compute(3e-3 if endpoint.get_rank() == 3 else 1e-3))
    # Three are done when each has had half a core for 2 ms; the last one has 2 ms of its own left, on a whole core.
    assert world.seconds == pytest.approx([2e-3, 2e-3, 2e-3, 4e-3])
    one = SimulatedWorld(2, ranks_at_once=1)
    one.run(lambda endpoint: endpoint.compute(1e-3) if endpoint.get_rank() == 0 else None)
    assert one.makespan == pytest.approx(1e-3), "the other one needs none"


def test_a_message_that_nobody_waits_for_is_named() -> None:
    def begin(endpoint: SimulatedEndpoint) -> None:
        rank = endpoint.get_rank()
        (endpoint.isend if rank == 0 else endpoint.irecv)(torch.ones(1), 1 - rank)

    with pytest.raises(HalfMessage, match="a message from rank 0 to rank 1 was not waited for"):
        SimulatedWorld(2).run(begin)
