"""The door for traffic: results, the ledger, and waits that end with a sentence."""

import time

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, process_group, run_ranks

from distlab.collectives.algorithms import allreduce_ring, broadcast_naive
from distlab.comm.endpoint import CountingEndpoint
from distlab.comm.endpoint import process_group as process_group_endpoint
from distlab.comm.grid import Grid
from distlab.comm.recorder import Ledger
from distlab.comm.traffic import traffic
from distlab.comm.waits import TrafficError
from distlab.rendezvous.ranks import open_store

pytestmark = pytest.mark.alone


def exchange(rank: int, world_size: int, port: int) -> tuple[list[float], float, float, dict[str, int], dict[str, int]]:
    with process_group(rank, world_size, port):
        tensor = torch.tensor([float(rank), 10.0 * rank])
        traffic.all_reduce(tensor, "the gradients", kind="gradients").wait()
        most = torch.tensor(float(rank))
        traffic.all_reduce(most, "the most", kind="loss", op=dist.ReduceOp.MAX).wait()
        sent = torch.full((3,), float(rank))
        traffic.broadcast(sent, "the weights", kind="weights", src=world_size - 1).wait()
        ledger = traffic.ledger
        return tensor.tolist(), most.item(), sent[2].item(), dict(ledger.sent_bytes), dict(ledger.messages)


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_and_ledger(world_size: int) -> None:
    ended = run_ranks(world_size, exchange, world_size, free_port())
    mean = (world_size - 1) / 2
    for rank, (averaged, most, sent, sent_bytes, messages) in enumerate(ended):
        assert averaged == pytest.approx([mean, 10 * mean])
        assert most == sent == world_size - 1
        assert messages == {"gradients": 1, "loss": 1, "weights": 1}
        ring = 2 * (world_size - 1) / world_size
        assert sent_bytes["gradients"] == int(8 * ring)
        assert sent_bytes["loss"] == int(4 * ring)
        assert sent_bytes["weights"] == (12 if rank == world_size - 1 else 0)


def test_without_a_process_group_there_is_nobody_to_talk_to() -> None:
    before = dict(traffic.ledger.messages)
    tensor = torch.tensor([1.0, 2.0])
    traffic.all_reduce(tensor, "the gradients", kind="gradients").wait()
    traffic.broadcast(tensor, "the weights", kind="weights").wait()
    assert tensor.tolist() == [1.0, 2.0]
    assert dict(traffic.ledger.messages) == before


def count_sends(rank: int, port: int) -> tuple[list[int], dict[str, int], dict[str, int]]:
    """Bytes counted over two endpoints, and the ledger after an all-reduce by hand beside which others are sent."""
    with process_group(rank, 2, port):
        other, received = 1 - rank, torch.empty(3)
        counted = []
        for inner in (process_group_endpoint(), dist):
            endpoint = CountingEndpoint(inner)
            allreduce_ring(torch.ones(10), endpoint=endpoint)
            broadcast_naive(torch.ones(5), 0, endpoint)
            message = endpoint.isend(torch.ones(3), other)
            endpoint.recv(received, other)
            message.wait()
            allreduce_ring(torch.ones(2))
            counted.append(endpoint.sent_bytes)
        begun = traffic.all_reduce(torch.ones(10), "a", kind="a", op=dist.ReduceOp.SUM, by_hand=allreduce_ring)
        begun.wait()
        sent = traffic.send(torch.ones(3), "b", to=other, kind="b")
        traffic.receive(received, "b", source=other).wait()
        sent.wait()
        return counted, dict(traffic.ledger.sent_bytes), dict(traffic.ledger.messages)


def test_a_counting_endpoint_counts_what_is_sent_through_it_and_nothing_else() -> None:
    ring, message, broadcast = 20 + 20, 12, 20
    by_rank = [[ring + message + broadcast] * 2, [ring + message] * 2]  # rank 0 is the root of the broadcast
    for (counted, sent_bytes, messages), expected in zip(run_ranks(2, count_sends, free_port()), by_rank, strict=True):
        assert counted == expected
        assert sent_bytes == {"a": 40, "b": 12}
        assert messages == {"a": 1, "b": 1}


def test_the_kind_to_count_as_is_the_outer_one_again_after_the_inner_one() -> None:
    ledger = Ledger()
    with ledger.counted_as("validation"):
        with ledger.counted_as("check"):
            ledger.count("loss", 1)
        ledger.count("activations", 20)
    ledger.count("loss", 300)
    assert ledger.sent_bytes == {"check": 1, "validation": 20, "loss": 300}


def pass_on(rank: int, port: int) -> tuple[list[float], dict[str, int], dict[str, int]]:
    """Three messages round a ring of three, receives posted before anything is sent."""
    with process_group(rank, 3, port):
        received = [torch.empty(2) for _ in range(3)]
        before, after = (rank - 1) % 3, (rank + 1) % 3
        posted = [traffic.receive(tensor, f"message {k}", source=before) for k, tensor in enumerate(received)]
        sent = [
            traffic.send(torch.full((2,), 10.0 * rank + k), f"message {k}", to=after, kind="activations")
            for k in range(3)
        ]
        for transfer in [*posted, *sent]:
            transfer.wait()
        return [tensor[1].item() for tensor in received], dict(traffic.ledger.sent_bytes), dict(traffic.ledger.messages)


def test_messages_arrive_in_order_and_are_counted_where_they_are_sent() -> None:
    for rank, (received, sent_bytes, messages) in enumerate(run_ranks(3, pass_on, free_port())):
        before = (rank - 1) % 3
        assert received == [10.0 * before, 10.0 * before + 1, 10.0 * before + 2]
        assert sent_bytes == {"activations": 24}
        assert messages == {"activations": 3}


def average_in_groups(rank: int, port: int) -> tuple[float, int]:
    """Ranks 0 and 2 average, and ranks 1 and 3; the mean and the bytes sent."""
    with process_group(rank, 4, port):
        grid = Grid(rank, {"dp": 2, "pp": 2})
        grid.make_groups("dp")
        tensor = torch.full((8,), float(rank))
        traffic.all_reduce(tensor, "the gradients", kind="gradients", group=grid.axis("dp").group).wait()
        return tensor[0].item(), traffic.ledger.sent_bytes["gradients"]


def test_an_average_over_the_replicas_of_a_stage() -> None:
    assert run_ranks(4, average_in_groups, free_port()) == [(1, 32), (2, 32), (1, 32), (2, 32)]


def come_late(rank: int, port: int) -> list[float]:
    """Seconds in the ledger after each of two futures whose result the other rank delays by half a second."""
    with process_group(rank, 2, port):
        waited = []
        for is_waited_for in (False, True):
            dist.barrier()
            time.sleep(0.5 * rank)
            average = traffic.all_reduce(torch.ones(4), "the gradients", kind="gradients")
            assert average.future(is_waited_for).wait().tolist() == [1.0] * 4
            waited.append(traffic.ledger.waited_seconds)
        return waited


def test_a_future_counts_as_waiting_where_nothing_else_is_left_to_do() -> None:
    first, second = run_ranks(2, come_late, free_port())
    assert first[0] == second[0] == 0
    assert 0.4 < first[1] < 2
    assert second[1] < 0.3


def wait_for_a_silent_rank(rank: int, port: int) -> str:
    store = open_store(rank, "localhost", port, 30, lambda _: None)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    traffic.timeout_seconds = 1
    if rank == 2:
        time.sleep(3)
        return ""
    with pytest.raises(TrafficError) as caught:
        traffic.all_reduce(torch.zeros(4), "the gradients of bucket 7", kind="gradients").wait()
    return str(caught.value)


def test_a_wait_ends_at_the_deadline_and_says_who_waited_for_what() -> None:
    first, second, _ = run_ranks(3, wait_for_a_silent_rank, free_port())
    assert first.startswith("rank 0 waited 1.0 s for the gradients of bucket 7 from ranks 1 and 2: no answer")
    assert second.startswith("rank 1 waited 1.0 s for the gradients of bucket 7 from ranks 0 and 2: no answer")


def lose_a_rank(rank: int, port: int) -> tuple[str, float]:
    store = open_store(rank, "localhost", port, 30, lambda _: None)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        return "", 0.0  # and the process ends
    started = time.monotonic()
    with pytest.raises(TrafficError) as caught:
        traffic.all_reduce(torch.zeros(4), "the weights", kind="weights").wait()
    return str(caught.value), time.monotonic() - started


def test_a_wait_ends_at_once_when_the_other_rank_is_gone() -> None:
    (message, seconds), _ = run_ranks(2, lose_a_rank, free_port())
    assert "for the weights from rank 1: a rank has exited" in message
    assert seconds < 10
