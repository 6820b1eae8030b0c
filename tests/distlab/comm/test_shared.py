"""Collectives in memory that ranks share: sums to the last bit, order, and what happens when a rank fails."""

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, process_group, run_ranks
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.shared import SharedCombination
from distlab.comm.traffic import Transport, traffic
from distlab.comm.transfer import Transfer, wait_for_all
from distlab.comm.waits import TrafficError
from distlab.parallel.data import MyDP
from distlab.rendezvous.ranks import open_store

pytestmark = pytest.mark.alone
SIZES = [1, 7, 1001, 300_007]  # of the last, a share has several chunks
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT]


def operand(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)).to(dtype)


def combined(world_size: int, elements: int, dtype: torch.dtype, op: ReduceOp.RedOpType) -> Tensor:
    """What the documentation promises, bit for bit: combined in the order of the ranks."""
    result = operand(0, elements, dtype)
    for rank in range(1, world_size):
        other = operand(rank, elements, dtype)
        if op == ReduceOp.PRODUCT:
            result = result * other
        elif op in (ReduceOp.MAX, ReduceOp.MIN):
            result = (torch.maximum if op == ReduceOp.MAX else torch.minimum)(result, other)
        else:
            result = result + other
    return result / world_size if op == ReduceOp.AVG else result


def reduce_all(rank: int, world_size: int, port: int) -> list[Tensor]:
    """All-reduces of all sizes, types and operations, three under way at a time."""
    with process_group(rank, world_size, port):
        traffic.transport = "shared"
        results = []
        for dtype in DTYPES:
            buffers = [traffic.new_buffer(elements, torch.empty(0, dtype=dtype)) for elements in SIZES]
            for op in OPS:
                for buffer in buffers:
                    buffer.copy_(operand(rank, len(buffer), dtype))
                transfers = [traffic.all_reduce(b, "the sums", kind="gradients", op=op) for b in buffers]
                wait_for_all(transfers[:3])
                transfers[3].wait()
                results += [buffer.clone() for buffer in buffers]
                for size in SIZES:  # in one buffer, which grows
                    own = operand(rank, size, dtype)
                    results.append(traffic.all_reduced(own, "the sums", kind="activations", op=op))
                    assert torch.equal(own, operand(rank, size, dtype))
        assert traffic._shared or world_size == 1
        return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_ranks_have_the_sums_in_the_order_of_the_ranks(world_size: int) -> None:
    sizes = [*SIZES, *SIZES]  # in buffers, and copied through one
    expected = [combined(world_size, size, dtype, op) for dtype in DTYPES for op in OPS for size in sizes]
    for results in run_ranks(world_size, reduce_all, world_size, free_port()):
        for own, promised in zip(results, expected, strict=True):
            torch.testing.assert_close(own, promised, rtol=0, atol=0)


def run_ahead(rank: int, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of which one rank is late to read the terms, as another rank already writes its next one."""
    combine = SharedCombination._do_share

    def late(self: SharedCombination) -> None:
        time.sleep(0.02)
        combine(self)

    if rank == 1:
        monkeypatch.setattr(SharedCombination, "_do_share", late)
    with process_group(rank, 3, port):
        traffic.transport = "shared"
        places = set()
        for number in range(12):
            dtype, shape = (torch.float32, torch.float64)[number % 3 == 2], (2, 51 - number % 2)
            own = torch.full(shape, rank + 10.0 * number, dtype=dtype)
            term = traffic.next_term(shape, own) if number < 8 else None
            if term is not None:
                places.add(term.data_ptr())
                own = term.copy_(own)
            total = traffic.all_reduced(own, "a sum", kind="activations", op=ReduceOp.SUM)
            assert torch.equal(total, torch.full(shape, 3 + 30.0 * number, dtype=dtype))
        assert len(places) == 4, "two for each type"


def test_a_rank_that_runs_ahead_does_not_overwrite_what_others_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(3, run_ahead, free_port(), monkeypatch)


def pass_on(rank: int, world_size: int, port: int) -> None:
    """Reduce-scatters, all-gathers and broadcasts, in shared memory or not, have the bits that are promised."""
    ranks = range(world_size)
    with process_group(rank, world_size, port):
        traffic.transport = "shared"
        for dtype in DTYPES:
            exact = torch.float32 if dtype == torch.bfloat16 else dtype
            for elements in (1, 7, 70_001):
                rows = [[operand(10 * sender + row, elements, dtype) for row in ranks] for sender in ranks]
                expected = sum((rows[sender][rank].to(exact) for sender in ranks[1:]), rows[0][rank].to(exact))
                like = torch.empty(world_size, elements, dtype=dtype)
                shared, source = traffic.new_buffer(like.numel(), like), traffic.new_buffer(elements, like)
                assert traffic.is_shared(shared) == traffic.is_shared(source[-1:]) == (world_size > 1)
                for parts in (shared.view_as(like), torch.empty_like(like)):
                    for own in (parts[rank], torch.empty(elements, dtype=dtype)):
                        parts.copy_(torch.stack(rows[rank]))
                        traffic.reduce_scatter(own, parts, "the sums", kind="gradients").wait()
                        assert torch.equal(own, expected.to(dtype))
                    for own in (parts[rank], source, torch.empty(elements, dtype=dtype)):
                        parts.fill_(-1)
                        own.copy_(rows[rank][0])
                        traffic.all_gather(parts, own, "the rows", kind="weights").wait()
                        assert torch.equal(parts, torch.stack([rows[sender][0] for sender in ranks]))
                for own in (source, torch.empty(elements, dtype=dtype)):
                    for sender in ranks:
                        own.copy_(rows[rank][0])
                        traffic.broadcast(own, "a row", kind="a row of each", src=sender).wait()
                        assert torch.equal(own, rows[sender][0])
        sent_bytes = traffic.ledger.sent_bytes
        assert sent_bytes["gradients"] * 3 == sent_bytes["weights"] * 2 or world_size == 1, "four and six of each"
        assert sent_bytes["a row of each"] * 3 * (world_size - 1) == sent_bytes["weights"], "two of each rank"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_reduce_scatter_all_gather_and_broadcast_are_those_over_gloo_to_the_last_bit(world_size: int) -> None:
    run_ranks(world_size, pass_on, world_size, free_port())


def reduce_in_another_order(rank: int, port: int) -> list[float]:
    """Waits in another order than that in which the all-reduces began, a part of a buffer, and a group of two ranks."""
    with process_group(rank, 3, port):
        traffic.transport = "shared"
        pair = dist.new_group([0, 2])
        first, second = (traffic.new_buffer(5, torch.empty(0)) for _ in range(2))
        first[:], second[:] = rank, 10 * rank
        begun = [traffic.all_reduce(b, "a sum", kind="gradients", op=ReduceOp.SUM) for b in (first, second[1:4])]
        begun[1].wait()
        begun[0].wait()
        result = [first[4].item(), *second.tolist()]
        if rank != 1:
            third = traffic.new_buffer(3, torch.empty(0), pair)
            third[:] = rank
            traffic.all_reduce(third, "a sum", kind="gradients", group=pair).wait()
            result.append(third[2].item())
            traffic.broadcast(third.fill_(rank), "a number", kind="weights", src=2, group=pair).wait()
            assert third.tolist() == [2, 2, 2]
        assert traffic.ledger.messages["gradients"] == 2 + (rank != 1)
        return result


def test_parts_of_buffers_groups_and_any_order_of_waits() -> None:
    results = run_ranks(3, reduce_in_another_order, free_port())
    for rank, (summed, *parts) in enumerate(results):
        assert summed == 3
        assert parts == [10 * rank, 30, 30, 30, 10 * rank] + [1] * (rank != 1)


def send_with_gaps(rank: int, port: int) -> None:
    """Columns, which have gaps between their elements, in shared memory and outside."""
    with process_group(rank, 2, port):
        shared = traffic.new_buffer(6000, torch.empty(0)).view(-1, 2)
        assert traffic.is_shared(shared)
        for matrix in (shared, torch.empty(3000, 2)):
            column, whole = matrix.fill_(rank)[:, 0], torch.empty(2, 3000)
            for begin in (
                partial(traffic.all_reduce, column),
                partial(traffic.broadcast, column),
                partial(traffic.all_gather, whole, column),
                partial(traffic.reduce_scatter, column, whole),
                partial(traffic.send, column, to=1 - rank),
            ):
                with pytest.raises(ValueError, match=r"\(3000,\) with strides \(2,\): only contiguous ones are sent"):
                    begin(what="a sum", kind="gradients").wait()
            assert (matrix == rank).all()


def test_a_tensor_with_gaps_is_refused() -> None:
    run_ranks(2, send_with_gaps, free_port())


def fail(rank: int, port: int, failing: int, collective: str, is_silent: bool, is_begun: bool) -> tuple[str, float]:
    """What the others say, and after how long, when a rank gives its part or not, and is then silent, or ends."""
    store = open_store(rank, "localhost", port, 30, lambda _: None)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    parts = traffic.new_buffer(300_000, torch.empty(0)).view(3, -1)
    begin: dict[str, Callable[..., Transfer]] = {
        "all-reduce": partial(traffic.all_reduce, parts),
        "reduce-scatter": partial(traffic.reduce_scatter, parts[rank], parts),
        "all-gather": partial(traffic.all_gather, parts, parts[rank]),
        "broadcast of rank 1": partial(traffic.broadcast, parts, src=1),
    }
    if is_silent:
        traffic.timeout_seconds = 1
    transfers = []
    if rank != failing or is_begun:
        transfers.append(begin[collective]("the gradients of bucket 7", kind="gradients"))
    if rank == failing:
        time.sleep(3 if is_silent else 0.5)
        return "", 0.0  # and the process ends
    started = time.monotonic()
    with pytest.raises(TrafficError) as caught:
        wait_for_all(transfers)
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize(
    ("failing", "collective", "is_begun", "is_silent"),
    [
        (0, "all-reduce", False, True),
        (1, "all-reduce", False, True),
        (2, "all-gather", True, True),
        (0, "reduce-scatter", False, False),
        (1, "reduce-scatter", False, False),
        (2, "all-gather", False, False),
        (0, "all-reduce", True, False),
        (1, "all-reduce", True, False),
        (2, "all-reduce", True, False),
        (0, "broadcast of rank 1", True, True),
        (1, "broadcast of rank 1", False, False),
        (2, "broadcast of rank 1", True, False),
    ],
)
def test_a_wait_ends_with_the_usual_sentence(failing: int, collective: str, is_begun: bool, is_silent: bool) -> None:
    why = "no answer" if is_silent else "a rank has exited"
    whose = collective.removeprefix("broadcast") if collective.startswith("broadcast") else ""
    for rank, (sentence, seconds) in enumerate(
        run_ranks(3, fail, free_port(), failing, collective, is_silent, is_begun)
    ):
        if rank != failing:
            peers = " and ".join(str(peer) for peer in range(3) if peer != rank)
            assert sentence.startswith(f"rank {rank} waited ")
            assert f" s for the gradients of bucket 7{whose} from ranks {peers}: {why}" in sentence
            assert seconds < 5


def lose_one_while_another_is_late(rank: int, port: int, lost: int) -> float:
    """After how long rank 0 notices that one of two ranks has exited, while the other one computes."""
    store = open_store(rank, "localhost", port, 30, lambda _: None)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    buffer = traffic.new_buffer(1000, torch.empty(0))
    if rank > 0:
        time.sleep(0.2 if rank == lost else 6)
        return 0.0  # and the process ends
    started = time.monotonic()
    with pytest.raises(TrafficError, match="a rank has exited"):
        traffic.all_reduce(buffer, "a sum", kind="gradients").wait()
    return time.monotonic() - started


@pytest.mark.parametrize("lost", [1, 2])
def test_the_end_of_a_rank_is_noticed_though_another_one_is_late(lost: int) -> None:
    assert run_ranks(3, lose_one_while_another_is_late, free_port(), lost)[0] < 4


def train_over(rank: int, port: int, transport: Transport) -> tuple[Tensor, dict[str, int], bool]:
    """A model's weights after three steps, the bytes sent, and whether its gradients are in shared memory."""
    with process_group(rank, 2, port):
        traffic.transport = transport
        linear = torch.nn.Linear(200, 400)
        model = MyDP(linear)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = linear.weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 200)).square().mean().backward()
            optimizer.step()
        assert not torch.equal(linear.weight, before)
        is_shared = bool(traffic._shared)
        return linear.weight.detach(), dict(traffic.ledger.sent_bytes), is_shared


def test_two_ranks_train_the_same_over_gloo_and_in_shared_memory_to_the_last_bit() -> None:
    over_gloo = run_ranks(2, train_over, free_port(), "gloo")
    shared_memory = run_ranks(2, train_over, free_port(), "auto")
    for (weight, sent_bytes, is_shared), (same, same_bytes, also) in zip(over_gloo, shared_memory, strict=True):
        assert (is_shared, also) == (False, True)
        assert torch.equal(weight, same), "a sum of two numbers does not depend on their order"
        assert sent_bytes == same_bytes
