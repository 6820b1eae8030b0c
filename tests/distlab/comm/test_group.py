"""The lab's process group: what it counts, and how it names what travels."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, process_group, run_ranks
from torch import nn
from torch.distributed import ReduceOp

from distlab.axes.grid import Grid
from distlab.comm.context import Options, TransportName, context_of, during
from distlab.comm.group import (
    all_gather_single,
    close_queues,
    connect_nccl,
    device_of,
    empty,
    open_queues,
    reduce_scatter_single,
    shares,
)
from distlab.comm.names import counted_as, named
from distlab.comm.recorder import MESSAGE, SEND, WAIT
from distlab.comm.together import texts_of_all, together


def exchange(rank: int, world_size: int, port: int) -> tuple[dict[str, int], dict[str, int]]:
    with process_group(rank, world_size, port) as context:
        with named("the gradients", "gradients"):
            dist.all_reduce(torch.tensor([float(rank), 10.0 * rank]), ReduceOp.AVG)
        with named("the most", "loss"):
            dist.all_reduce(torch.tensor(float(rank)), ReduceOp.MAX)
        with named("the weights", "weights"):
            dist.broadcast(torch.full((3,), float(rank)), world_size - 1)
        own, rows, root = torch.ones(3), torch.ones(world_size, 3), world_size - 1
        of_root = list(rows) if rank == root else None
        dist.gather(own, of_root, root)
        dist.scatter(own, of_root, root)
        dist.reduce(own, root)
        all_gather_single(rows, own)
        reduce_scatter_single(own, rows)
        with named("the rows", "rows"):
            dist.all_gather(list(rows), own)
        ledger = context.ledger
        return dict(ledger.sent_bytes), dict(ledger.messages)


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_and_bytes_are_counted_by_kind(world_size: int) -> None:
    for rank, (sent_bytes, messages) in enumerate(run_ranks(world_size, exchange, world_size, free_port())):
        plain = "gather", "scatter", "reduce", "all_gather", "reduce_scatter", "rows"
        assert messages == dict.fromkeys(("gradients", "loss", "weights", *plain), 1)
        others, is_root = world_size - 1, rank == world_size - 1
        ring = 2 * others / world_size
        assert sent_bytes["gradients"] == int(8 * ring)
        assert sent_bytes["loss"] == int(4 * ring)
        assert sent_bytes["weights"] == (12 if is_root else 0)
        expected = [12 * (not is_root), 12 * others * is_root, 12 * (not is_root), *[12 * others] * 3]
        assert [sent_bytes[kind] for kind in plain] == expected


def test_a_rank_alone_sends_nothing_and_counts_nothing() -> None:
    before, tensor = dict(context_of().ledger.messages), torch.tensor([1.0, 2.0])
    dist.all_reduce(tensor, ReduceOp.AVG)
    dist.broadcast(tensor, 0)
    dist.barrier()
    assert tensor.tolist() == [1.0, 2.0]
    assert dict(context_of().ledger.messages) == before


def use_another_backend(rank: int, port: int) -> list[str]:
    store = dist.TCPStore("localhost", port, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    with pytest.raises(ValueError, match="init_process_group"):
        context_of()
    buffer, row = empty(5, torch.empty(0)), (0, 1)
    assert buffer.tolist() == [0] * 5
    assert not shares(buffer)
    open_queues(row, 20, buffer)
    close_queues(row)
    connect_nccl(None)
    assert device_of() == torch.device("cpu")
    grid = Grid(rank, {"dp": 2, "tp": 2})
    grid.make_groups("dp")
    with during("the other"):
        dist.all_reduce(buffer, group=grid.axis("dp").group)
    assert together("its work", lambda: rank) == rank
    return texts_of_all(f"rank {rank}", "the names")


def test_without_the_labs_backend_all_is_done_plainly() -> None:
    assert run_ranks(4, use_another_backend, free_port()) == [[f"rank {rank}" for rank in range(4)]] * 4


def test_a_rank_alone_is_done_at_once_and_calls_what_follows_in_order() -> None:
    own = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match=r"two dtypes, torch.float64 and torch.float32"):
        all_gather_single(torch.zeros(2, dtype=torch.float64), own)
    pending = dist.all_reduce(own, async_op=True)
    assert pending.is_completed()
    assert pending.get_future().wait()[0] is own
    order: list[str] = []
    follow = lambda: dist.all_reduce(own, async_op=True).then(lambda: order.append("last"))  # noqa: E731
    pending.then(lambda: order.append("first")).then(follow).wait()
    assert order == ["first", "last"], "what it starts is waited for, too"


def move_parameters(rank: int, world_size: int, port: int, transport: TransportName) -> None:
    """Collectives of tensors that need gradients, outside of `no_grad`."""
    with process_group(rank, world_size, port, options=Options(transport=transport)):
        like = torch.empty(0)
        tensors = [torch.zeros(world_size * 4) for _ in range(3)] + [torch.zeros(4)]
        gathered, listed, exchanged, added = tensors
        for new in (torch.zeros, lambda length: empty(length, like)):
            lengths = 4, 4, 4, 4 * world_size
            first, second, third, each = (nn.Parameter(new(length).fill_(rank + 1)) for length in lengths)
            dist.all_gather(list(listed.chunk(world_size)), third)
            dist.all_gather_into_tensor(gathered, third)
            dist.reduce_scatter_tensor(added, each)
            dist.all_to_all_single(exchanged, each)
            dist.all_reduce(first)
            dist.broadcast(second, 0)
            ranks = [float(other + 1) for other in range(world_size)]
            assert first.tolist() == [sum(ranks)] * 4
            assert second.tolist() == [1.0] * 4
            assert added.tolist() == [sum(ranks)] * 4
            for received in (gathered, listed, exchanged):
                assert received.view(world_size, 4).tolist() == [[number] * 4 for number in ranks]
            assert all(tensor.grad_fn is None for tensor in (*tensors, first, second, third, each))


@pytest.mark.parametrize(("world_size", "transport"), [(1, "gloo"), (3, "gloo"), (3, "shared")])
def test_parameters_are_moved_without_a_graph(world_size: int, transport: TransportName) -> None:
    run_ranks(world_size, move_parameters, world_size, free_port(), transport)


def fill_in_inference_mode(rank: int, world_size: int, port: int, transport: TransportName) -> None:
    """Tensors of an inference mode, in it and after it, the first of which make the shared memory; then others."""
    with process_group(rank, world_size, port, options=Options(transport=transport)):
        with torch.inference_mode():
            first, second, added, wide = (torch.full((length,), rank + 1.0) for length in (6, 6, 6, 6 * world_size))
            dist.all_reduce(first)
        dist.all_reduce(second)
        dist.reduce_scatter_tensor(added, wide, ReduceOp.AVG)
        rows = list(wide.chunk(world_size))
        dist.all_to_all(rows, [torch.full((6,), rank + 1.0) for _ in rows])
        turned = [torch.empty(2, 3).t() for _ in rows]
        dist.all_to_all(turned, [torch.arange(6.0).view(3, 2) + rank for _ in rows])
        other = torch.full((6,), rank + 1.0)
        dist.all_reduce(other)
        ranks = range(1, world_size + 1)
        assert first.tolist() == second.tolist() == other.tolist() == [sum(ranks)] * 6
        assert added.tolist() == [sum(ranks) / world_size] * 6
        assert wide.tolist() == [rank for rank in ranks for _ in range(6)]
        assert [part.flatten().tolist() for part in turned] == [[*range(r, r + 6)] for r in range(world_size)]


@pytest.mark.parametrize(("world_size", "transport"), [(1, "gloo"), (3, "gloo"), (3, "shared")])
def test_tensors_of_an_inference_mode_are_filled(world_size: int, transport: TransportName) -> None:
    run_ranks(world_size, fill_in_inference_mode, world_size, free_port(), transport)


def name_no_rank(rank: int, port: int) -> None:
    with process_group(rank, 2, port):
        group, tensor = dist.new_group([0, 1]), torch.full((1000,), float(rank))
        for wrong in (2, -1):
            for call in (
                lambda: dist.broadcast(tensor, group=group, group_src=wrong),  # noqa: B023
                lambda: dist.send(tensor, group=group, group_dst=wrong),  # noqa: B023
                lambda: dist.recv(tensor, group=group, group_src=wrong),  # noqa: B023
            ):
                with pytest.raises(ValueError, match=f"there is no rank {wrong} in a group of 2 ranks"):
                    call()
        assert set(tensor.tolist()) == {rank}


def test_a_rank_that_the_group_has_not_is_named() -> None:
    run_ranks(2, name_no_rank, free_port())


def add_sparse_tensors(rank: int, port: int) -> list[float]:
    with process_group(rank, 2, port) as context:
        own = torch.sparse_coo_tensor(torch.tensor([[rank, 2]]), torch.tensor([1.0, 10.0]), (4,))
        with pytest.raises(ValueError, match="only an all-reduce takes sparse tensors"):
            dist.broadcast(own, 0)
        with pytest.raises(ValueError, match=r"layout torch\.sparse_csr: only an all-reduce takes .* \(COO\)"):
            dist.all_reduce(torch.eye(3).to_sparse_csr())
        dist.all_reduce(own)
        assert context.ledger.sent_bytes["all_reduce"] == 2 * 8 + 2 * 4
        return list(own.to_dense().tolist())


def test_sparse_tensors_are_added_up() -> None:
    assert run_ranks(2, add_sparse_tensors, free_port()) == [[1, 1, 20, 0]] * 2


@pytest.mark.filterwarnings("ignore:.*all_gather_coalesced:FutureWarning")
def test_a_rank_alone_gathers_several_tensors() -> None:
    received, own = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    dist.all_gather_coalesced([received], own)
    assert all(map(torch.equal, received, own))


def test_a_rank_alone_has_nobody_to_send_to() -> None:
    with pytest.raises(ValueError, match="this group has one rank"):
        dist.isend(torch.ones(2), 0)
    with pytest.raises(ValueError, match="this group has one rank"):
        dist.irecv(torch.empty(2), 0)


def count_apart(rank: int, port: int) -> dict[str, int]:
    with process_group(rank, 2, port) as context:
        tensor = torch.ones(4)
        with counted_as("validation"):
            with counted_as("check"), named("the loss", "loss"):
                dist.all_reduce(tensor)
            with named("the activations", "activations"):
                dist.all_reduce(tensor)
            dist.all_reduce(tensor)  # of a script
            with ThreadPoolExecutor(1) as of_autograd:  # which computes on a GPU in a thread of its own
                of_autograd.submit(dist.all_reduce, tensor).result()
        with named("the loss", "loss"):
            with named("who has it", "control"):
                dist.all_reduce(tensor)
            dist.all_reduce(tensor)
        dist.all_reduce(tensor)
        return dict(context.ledger.messages)


def test_the_kind_to_count_as_is_the_outer_one_again_after_the_inner_one() -> None:
    assert run_ranks(2, count_apart, free_port()) == [dict(check=1, validation=3, control=1, loss=1, all_reduce=1)] * 2


def pass_on(rank: int, port: int) -> tuple[list[float], dict[str, int], dict[str, int], list[str], list[str]]:
    """Messages round a ring of three, receives posted before anything is sent: three, and one in another group.

    The last values are the names in a trace of the messages that a rank has sent, and of those that it has received.
    """
    with process_group(rank, 3, port) as context:
        context.recorder.enabled = True
        received, groups = [torch.empty(2) for _ in range(4)], [None, None, None, dist.new_group(range(3))]
        before, after = (rank - 1) % 3, (rank + 1) % 3
        begun: list[Any] = [dist.irecv(tensor, before, group) for tensor, group in zip(received, groups, strict=True)]
        with named("a message", "activations"):
            begun += [dist.isend(torch.full((2,), 10.0 * rank + n), after, group) for n, group in enumerate(groups)]
        for pending in begun:
            pending.wait()
        events, ledger = context.recorder.events, context.ledger
        waited_from = min(event.start for event in events if event.kind == WAIT)
        seen = [event for event in events if event.kind == MESSAGE]
        assert len(seen) == 4, "a send says nothing of the arrival"
        assert all(event.start < waited_from for event in seen), "a message lasts from the posting of its receive"
        assert ledger.waited_seconds > ledger.collective_seconds == 0, "a wait for a message is none in a collective"
        sent, taken = ([e.flow for e in events if e.kind == kind and e.flow] for kind in (SEND, WAIT))
        return [tensor[1].item() for tensor in received], dict(ledger.sent_bytes), dict(ledger.messages), sent, taken


def test_messages_arrive_in_order_and_are_counted_where_they_are_sent() -> None:
    by_rank = run_ranks(3, pass_on, free_port())
    for rank, (received, sent_bytes, messages, sent, taken) in enumerate(by_rank):
        before = (rank - 1) % 3
        assert received == [10.0 * before + number for number in range(4)]
        assert (sent_bytes, messages) == ({"activations": 32}, {"activations": 4})
        assert len({*sent}) == 4, "also of messages in several groups"
        assert taken == by_rank[before][3]


def receive_from_any(rank: int, port: int) -> tuple[list[tuple[int | None, float]], list[str]]:
    """The ranks whose messages rank 0 has received, in the order of their sending, and these messages.

    Rank 0 then receives one that it expects. The last value is the name in a trace of the last message, at each end.
    """
    with process_group(rank, 3, port) as context:
        context.recorder.enabled = True
        group = dist.new_group([0, 2])
        received, found = torch.empty(1), list[tuple[int | None, float]]()
        for sender, among in ((2, None), (1, None), (2, group)):
            if rank == 0:
                found.append((dist.recv(received, group=among), received.item()))
            elif rank == sender:
                dist.send(torch.full((1,), 10.0 * rank), 0, group=among)
            dist.barrier()
        if rank == 0:
            dist.recv(received, 2, group=group)
        elif rank == 2:
            dist.send(received, 0, group=group)
        return found, [event.flow for event in context.recorder.events if event.flow][-1:]


def test_a_message_of_any_rank_comes_with_its_sender() -> None:
    (found, taken), _, (_, sent) = run_ranks(3, receive_from_any, free_port())
    assert found == [(2, 20), (1, 10), (2, 20)]
    assert taken == sent, "in a trace, the arrow to the next message begins where that was sent"
    assert taken


def share_in_groups(rank: int, port: int) -> list[bool]:
    """Whether each of two groups of the same ranks has shared memory: one is told to, in a run over gloo."""
    found = []
    with process_group(rank, 2, port, options=Options(transport="gloo")):
        for options in (None, Options(transport="shared")):
            group = dist.new_group(range(2), backend="lab", pg_options=options)
            tensor = empty(1000, torch.empty(0), group).fill_(1)
            dist.all_reduce(tensor, group=group)
            assert tensor[-1] == 2
            found.append(shares(tensor, group))
    return found


def test_a_group_has_the_transport_that_it_is_given() -> None:
    assert run_ranks(2, share_in_groups, free_port()) == [[False, True]] * 2


def poll(rank: int, port: int, transport: TransportName) -> list[bool]:
    """Whether calls are complete while rank 1 waits for a message that rank 0 sends after it has looked; then polls."""
    with process_group(rank, 3, port, options=Options(transport=transport)) as context:
        start, large = empty(1000, torch.empty(0)).fill_(rank), torch.full((700_000,), float(rank))
        open_queues((1, 0), 40, torch.empty(0))
        begun: list[Any] = [dist.all_reduce(start, async_op=True), dist.all_reduce(large, async_op=True)]
        if rank == 0 and transport == "shared":
            begun.append(dist.irecv(torch.empty(10), 1))
        found: list[bool] = []
        if rank == 1:
            dist.recv(torch.empty(1), 0)
            if transport == "shared":
                dist.send(torch.ones(10), 0)
        elif rank == 0:
            found = [pending.is_completed() for pending in begun] if transport == "shared" else []
            held_back = {"0,1,2": [0, 1]} if transport == "shared" else {}
            assert context.held_back() == held_back, "this rank may compute for long before it looks again"
            dist.send(torch.ones(1), 1)
        while not all([pending.is_completed() for pending in begun]):  # each of them does its share
            time.sleep(0.001)
        for pending in begun:
            pending.wait()
        assert start[-1] == large[-1] == 3
        return found


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_is_completed_does_not_wait_and_comes_to_be_true(transport: TransportName) -> None:
    looked = [False] * 3 if transport == "shared" else []
    assert run_ranks(3, poll, free_port(), transport) == [looked, [], []]


def wait_for_one_after_the_other(rank: int, port: int) -> list[dict[str, list[int]]]:
    """What a rank holds back of three collectives before and after it waits for the second, the first and the third."""
    with process_group(rank, 2, port, options=Options(transport="shared")) as context:
        begun = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
        found = [context.held_back()]
        for pending in (begun[1], begun[0], begun[2]):
            assert pending is not None
            pending.wait()
            found.append(context.held_back())
        return found


def test_a_rank_holds_back_what_it_has_not_waited_for() -> None:
    held_back = [{"0,1": [0, 1, 2]}, {"0,1": [2]}, {"0,1": [2]}, {}]
    assert run_ranks(2, wait_for_one_after_the_other, free_port()) == [held_back] * 2


def chain(rank: int, port: int, transport: TransportName) -> list[float]:
    """What `then` has called, in order, when an all-reduce has been waited for."""
    with process_group(rank, 2, port, options=Options(transport=transport)):
        first, second, order = torch.full((500,), 1.0), torch.full((500,), 2.0), list[float]()

        def follow() -> Any:
            order.append(first[0].item())
            return dist.all_reduce(second, async_op=True)

        begun: Any = dist.all_reduce(first, async_op=True)
        begun.then(follow).then(lambda: order.append(second[0].item())).wait()
        begun.wait()  # again, which does nothing
        last: Any = dist.all_reduce(first, async_op=True)
        last.synchronize()
        order.append(first[0].item())
        return order


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_then_calls_in_order_and_waits_for_what_it_starts(transport: TransportName) -> None:
    assert run_ranks(2, chain, free_port(), transport) == [[2, 4, 4]] * 2


def look_while_a_group_is_made(rank: int, port: int) -> list[int]:
    with process_group(rank, 2, port) as context:
        looks = iter(context.groups)  # as the thread that answers for this rank does
        found = [next(looks)]
        new = dist.new_group([0, 1])
        found += looks
        return [len(found), len(context.groups), found.count(new)]


def test_groups_can_be_gone_through_while_one_is_made() -> None:
    assert run_ranks(2, look_while_a_group_is_made, free_port()) == [[1, 2, 0]] * 2
