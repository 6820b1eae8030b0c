"""Mistakes and failures in collectives in memory that ranks share: each ends with a sentence, on all ranks."""

import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import assert_told, free_port, join, meeting_of, process_group, run_ranks
from torch import Tensor

from distlab.comm.context import Options
from distlab.comm.group import all_gather_single, empty, reduce_scatter_single, shares
from distlab.comm.names import named
from distlab.comm.waits import TrafficError

SHARED = Options(transport="shared")


def give_at_two_places(rank: int, port: int, in_place: int, has_slots: bool) -> str:
    """The error of each rank if only one of them gives a tensor in shared memory; the process ends with it."""
    join(rank, 3, port, options=SHARED)
    shared, plain = empty(1000, torch.empty(0)), torch.zeros(1000)
    if has_slots:
        dist.all_reduce(plain)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(shared if rank == in_place else plain)
    return str(caught.value)


@pytest.mark.parametrize(("in_place", "has_slots"), [(0, True), (1, True), (1, False)])
def test_ranks_of_which_one_gives_a_tensor_in_shared_memory_are_all_told_so(in_place: int, has_slots: bool) -> None:
    call = "all_reduce by SUM of 1,000 elements of torch.float32"
    calls = {0: call if in_place == 0 else f"{call} outside of shared memory"}
    calls[max(1, in_place)] = call if in_place else f"{call} outside of shared memory"
    told = ", ".join(f"rank {rank} {said}" for rank, said in calls.items())
    sentence = f"the ranks called different collectives: {told}; all must call the same one"
    assert run_ranks(3, give_at_two_places, free_port(), in_place, has_slots) == [sentence] * 3


COLLECTIVES: dict[str, Callable[[Tensor, dist.ProcessGroup], object]] = {
    "all_reduce by SUM of 600 elements": lambda own, group: dist.all_reduce(own, group=group),
    "broadcast from rank 1 of 600 elements": lambda own, group: dist.broadcast(own, 1, group),
    "all_gather of 600 elements": lambda own, group: all_gather_single(own.repeat(3), own, group),
    "reduce_scatter of 600 elements": lambda own, group: reduce_scatter_single(own.new_empty(200), own, group=group),
    "all_to_all of 600 elements": lambda own, group: dist.all_to_all_single(own.clone(), own, group=group),
    "all_to_all with sizes": lambda own, group: dist.all_to_all_single(own.clone(), own, [200] * 3, [200] * 3, group),
}


def give_several_dtypes(rank: int, port: int) -> list[str]:
    """What ranks say of each collective, of tensors in shared memory and outside, in a group of its own.

    Ranks 1 and 2 then also make a call without rank 0.
    """
    said, dtype = [], (torch.float32, torch.float32, torch.float16)[rank]
    with process_group(rank, 3, port, options=SHARED) as context:
        context.waits.timeout_seconds = 5
        for is_in_place, call in itertools.product([False, True], COLLECTIVES.values()):
            group = dist.new_group(range(3))
            own = empty(600, torch.empty(0), group) if is_in_place else torch.ones(600)
            with pytest.raises(RuntimeError) as caught:
                call(own.view(dtype)[:600], group)
            said.append(str(caught.value))
        pair = dist.new_group([1, 2])
        if rank > 0:
            with pytest.raises(RuntimeError, match=r"rank 1 broadcast from rank 1 .*, rank 2 broadcast from rank 1 "):
                dist.broadcast(torch.ones(600, dtype=dtype), 1, pair)
    return said


def test_ranks_that_give_several_dtypes_are_all_told_so() -> None:
    by_rank = run_ranks(3, give_several_dtypes, free_port())
    sentences = [
        f"the ranks called different collectives: rank 0 {name} of torch.float32, rank 2 {name} of torch.float16; "
        "all must call the same one"
        for name in COLLECTIVES
    ]
    assert by_rank == [[*sentences, *sentences]] * 3


def call_what_others_do_not(rank: int, port: int) -> list[str]:
    """What ranks say if one of them makes a call with another size, operation, root or collective, in a group each."""
    said = []
    calls: list[Callable[[Tensor, dist.ProcessGroup], object]] = [
        lambda own, group: dist.all_reduce(own[: 600 - rank], group=group),
        lambda own, group: dist.all_reduce(own, dist.ReduceOp.AVG if rank else dist.ReduceOp.MAX, group),
        lambda own, group: dist.broadcast(own, rank, group),
        lambda own, group: dist.all_reduce(own, group=group) if rank else dist.broadcast(own, 1, group),
    ]
    with process_group(rank, 2, port, options=SHARED):
        for is_in_place, call in itertools.product([False, True], calls):
            group = dist.new_group(range(2))
            own = empty(600, torch.empty(0), group) if is_in_place else torch.ones(600)
            with pytest.raises(RuntimeError, match="the ranks called different collectives: rank 0 ") as caught:
                call(own, group)
            said.append(str(caught.value).partition("rank 0 ")[2].partition(";")[0].replace(" of torch.float32", ""))
    return said


def test_ranks_that_call_different_collectives_are_all_told_so() -> None:
    calls = [
        "all_reduce by SUM of 600 elements, rank 1 all_reduce by SUM of 599 elements",
        "all_reduce by MAX of 600 elements, rank 1 all_reduce by AVG of 600 elements",
        "broadcast from rank 0 of 600 elements, rank 1 broadcast from rank 1 of 600 elements",
        "broadcast from rank 1 of 600 elements, rank 1 all_reduce by SUM of 600 elements",
    ]
    assert run_ranks(2, call_what_others_do_not, free_port()) == [[*calls, *calls]] * 2


def give_what_the_other_has_freed(rank: int, port: int) -> None:
    with process_group(rank, 2, port, options=SHARED):
        group = dist.new_group(range(2))
        tensors = [empty(600, torch.empty(0), group) for _ in range(2)]
        begun: Any = dist.all_reduce(tensors[rank], group=group, async_op=True)
        del tensors[:rank]
        for _ in range(2 * rank):  # also if it is waited for again
            with pytest.raises(RuntimeError, match="of which this rank has freed its part"):
                begun.wait()


def test_a_tensor_in_memory_that_another_rank_has_freed_is_named() -> None:
    run_ranks(2, give_what_the_other_has_freed, free_port())


def wait_when_the_group_is_gone(rank: int, port: int) -> None:
    with process_group(rank, 2, port, options=SHARED):
        group = dist.new_group(range(2))
        begun: Any = dist.all_reduce(torch.empty(600), group=group, async_op=True)
        dist.barrier()
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="the group of this collective was destroyed before"):
            begun.wait()


def test_a_collective_of_a_group_that_is_gone_cannot_be_waited_for() -> None:
    run_ranks(2, wait_when_the_group_is_gone, free_port())


def send_other_memory(rank: int, port: int) -> None:
    """Columns, which have gaps between their elements, in shared memory and outside; and a negative view."""
    with process_group(rank, 2, port, options=SHARED):
        buffer = empty(6000, torch.empty(0)).view(-1, 2)
        assert shares(buffer)
        whole = torch.empty(2, 3000)
        rows = list(whole) if rank == 0 else None
        calls: list[Callable[[Tensor], object]] = [
            dist.all_reduce,
            lambda column: dist.broadcast(column, 0),
            lambda column: all_gather_single(whole, column),
            lambda column: dist.all_gather(list(whole), column),
            lambda column: reduce_scatter_single(column, whole),
            lambda column: dist.all_to_all_single(torch.empty(3000), column),
            lambda column: dist.reduce(column, 0),
            lambda column: dist.gather(column, rows, 0),
            lambda column: dist.scatter(column, rows, 0),
            lambda column: dist.send(column, 1 - rank),
            lambda column: dist.recv(column, 1 - rank),
        ]
        for matrix in (buffer, torch.empty(3000, 2)):
            matrix.fill_(rank)
            for call in calls:
                with pytest.raises(ValueError, match=r"\(3000,\) with strides \(2,\) is not contiguous"):
                    call(matrix[:, 0])
            assert (matrix == rank).all()
        negative = torch.full((1,), complex(1, 2)).conj().imag
        for transfer in (dist.send, dist.recv, lambda part, _: dist.scatter(torch.empty(1), [part] * 2, rank)):
            with pytest.raises(ValueError, match=r"yet to negate; call \.resolve_neg"):
                transfer(negative, 1 - rank)


def test_a_tensor_whose_memory_is_not_its_content_is_refused() -> None:
    run_ranks(2, send_other_memory, free_port())


def mix_dtypes(rank: int, port: int) -> None:
    """An output of another dtype than the input, in shared memory and outside."""
    with process_group(rank, 2, port, options=SHARED):
        for own in (empty(6000, torch.empty(0)), torch.empty(6000)):
            own.fill_(rank)
            wide, half = torch.empty(12_000, dtype=torch.float64), torch.empty(3000, dtype=torch.bfloat16)
            for call, output in ((all_gather_single, wide), (reduce_scatter_single, half)):
                with pytest.raises(ValueError, match=r"two dtypes, torch.(float64|bfloat16) and torch.float32"):
                    call(output, own)
            assert (own == rank).all()


def test_dtypes_that_a_call_cannot_have_are_refused() -> None:
    run_ranks(2, mix_dtypes, free_port())


def reduce_in_unknown_ways(rank: int, port: int) -> None:
    with process_group(rank, 2, port, options=SHARED):
        with pytest.raises(ValueError, match="does not reduce by PREMUL_SUM"):
            dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0))
        numbers = torch.ones(1000, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"no average of torch\.int64"):
            dist.all_reduce(numbers, dist.ReduceOp.AVG)
        with pytest.raises(ValueError, match=r"no average of torch\.int64"):
            reduce_scatter_single(numbers.new_empty(500), numbers, dist.ReduceOp.AVG)
        dist.all_reduce(numbers)
        assert set(numbers.tolist()) == {2}, "the group goes on"
        dist.all_reduce(waves := torch.full((1000,), 1j * rank), dist.ReduceOp.AVG)
        assert set(waves.tolist()) == {0.5j}


def test_reductions_that_the_lab_does_not_know_are_refused() -> None:
    run_ranks(2, reduce_in_unknown_ways, free_port())


def fail(
    rank: int, port: int, end: Barrier, failing: int, collective: str, is_silent: bool, is_begun: bool
) -> tuple[str, float]:
    """What the others say, and after how long, when a rank gives its part or not, and is then silent, or ends."""
    context = join(rank, 3, port, options=SHARED)
    parts, plain = empty(300_000, torch.empty(0)).view(3, -1), torch.zeros(3, 1_000_000)
    dist.broadcast(plain, 0)  # makes the slots
    begin: dict[str, Callable[[], Any]] = {
        "all-reduce": partial(dist.all_reduce, parts, async_op=True),
        "all-reduce through slots": partial(dist.all_reduce, plain, async_op=True),
        "reduce-scatter": partial(reduce_scatter_single, parts[rank], parts, async_op=True),
        "all-gather": partial(all_gather_single, parts, parts[rank], async_op=True),
        "broadcast of rank 1": partial(dist.broadcast, parts, 1, async_op=True),
    }
    own_limit = timedelta(seconds=0.5 if is_silent and failing == 1 else 0)  # of the wait; 0: the usual one
    if is_silent and not own_limit:
        context.waits.timeout_seconds = 0.5
    begun = []
    if rank != failing or is_begun:
        with named("the gradients of bucket 7", "gradients"):
            begun.append(begin[collective]())
    said = "", 0.0
    if rank != failing:
        started = time.monotonic()
        with pytest.raises(TrafficError) as caught:
            begun[0].wait(own_limit)
        said = str(caught.value), time.monotonic() - started
    elif not is_silent:
        time.sleep(0.3)  # in which the others begin to wait; then the process ends
    if is_silent:
        end.wait(20)
    return said


@pytest.mark.parametrize(
    ("failing", "collective", "is_begun", "is_silent"),
    [
        (0, "all-reduce", False, True),
        (1, "all-reduce", False, True),
        (2, "all-gather", True, True),
        (0, "reduce-scatter", False, False),
        (0, "all-reduce", True, False),
        (2, "all-reduce", True, False),
        (0, "broadcast of rank 1", True, True),
        (1, "broadcast of rank 1", False, False),
        (2, "broadcast of rank 1", True, False),
        (0, "all-reduce through slots", False, False),
        (1, "all-reduce through slots", True, True),
    ],
)
def test_a_wait_ends_with_the_usual_sentence(failing: int, collective: str, is_begun: bool, is_silent: bool) -> None:
    whose = collective.removeprefix("broadcast") if collective.startswith("broadcast") else ""
    by_rank = run_ranks(3, fail, free_port(), meeting_of(3), failing, collective, is_silent, is_begun)
    assert_told(by_rank, failing, f"the gradients of bucket 7{whose}", is_silent)


def lose_one_while_another_is_late(rank: int, port: int, end: Barrier, lost: int) -> None:
    """Rank 0 notices that one of two ranks has exited, while the other one computes until it has."""
    join(rank, 3, port)
    buffer = empty(1000, torch.empty(0))
    if rank == lost:
        time.sleep(0.2)
        return  # and the process ends
    if rank == 0:
        with pytest.raises(TrafficError, match="a rank has exited"):
            dist.all_reduce(buffer)
    end.wait(20)


@pytest.mark.parametrize("lost", [1, 2])
def test_the_end_of_a_rank_is_noticed_though_another_one_is_late(lost: int) -> None:
    run_ranks(3, lose_one_while_another_is_late, free_port(), meeting_of(2), lost)
