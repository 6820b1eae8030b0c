"""The sentiment classifier's groups of ranks, and what they tell each other."""

import re
from typing import Any

import pytest
import torch
from support.processes import free_port, join, meeting_of, process_group, run_ranks
from support.sentiment_ranks import load, on_ranks

from distlab.comm.waits import TrafficError
from simplellm.errors import InputError


def test_functions_leave_their_inputs_alone_and_are_each_others_transpose() -> None:
    def work() -> None:
        pcomm = load("pcomm")
        own = torch.arange(6.0).view(2, 3) + 10 * pcomm.tp_rank
        others = torch.arange(6.0).view(2, 3) + 10 * (1 - pcomm.tp_rank)
        side_by_side = torch.cat([own, others] if pcomm.tp_rank == 0 else [others, own], dim=-1)
        expected = {"Duplication": own, "AllReduce": own + others, "AllGather": side_by_side}
        for name, y_expected in expected.items():
            x = own.clone().requires_grad_()
            y = getattr(pcomm, name).apply(x)
            grad = torch.arange(float(y.numel())).view_as(y) * (1 + pcomm.tp_rank)
            grad_before = grad.clone()
            (x_grad,) = torch.autograd.grad(y, x, grad)
            assert torch.equal(y, y_expected), name
            assert torch.equal(x, own), f"{name} changed its input"
            assert torch.equal(grad, grad_before), f"{name} changed the gradient that it was given"
            transposed = {"Duplication": 3 * grad_before / (1 + pcomm.tp_rank), "AllReduce": grad_before}
            wanted = transposed.get(name, grad_before[:, 3 * pcomm.tp_rank :][:, :3])
            assert torch.equal(x_grad, wanted), name

    on_ranks(2, 2, work)


def test_without_groups_each_rank_is_one_of_its_own() -> None:
    port = free_port()

    def work(rank: int) -> None:
        with process_group(rank, 2, port):
            pcomm = load("pcomm")
            for name in ("Duplication", "AllReduce", "AllGather"):
                x = torch.full((2, 3), float(rank), requires_grad=True)
                y = getattr(pcomm, name).apply(x)
                (grad,) = torch.autograd.grad(y, x, torch.full((2, 3), 5.0 + rank))
                assert torch.equal(y, x), name
                assert torch.equal(grad, torch.full((2, 3), 5.0 + rank)), name

    run_ranks(2, work)


def test_gradients_of_gradients_are_refused_for_they_would_miss_the_other_ranks() -> None:
    def work() -> None:
        for name in ("Duplication", "AllReduce", "AllGather"):
            x = torch.ones(2, 3, requires_grad=True)
            y = getattr(load("pcomm"), name).apply(x).square().sum()
            (grad,) = torch.autograd.grad(y, x, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                grad.sum().backward()

    on_ranks(2, 2, work)


def test_a_rank_that_stops_within_a_layer_ends_its_group_at_the_deadline() -> None:
    port, end = free_port(), meeting_of(4)

    def work(rank: int) -> str:
        waits, pcomm, said = join(rank, 4, port).waits, load("pcomm"), ""
        pcomm.init(2)
        waits.timeout_seconds = 1
        if rank == 0:  # and rank 1, of the same group, does not come
            with pytest.raises(TrafficError) as caught:
                pcomm.AllReduce.apply(torch.ones(2))
            said = str(caught.value)
        end.wait(20)
        return said

    sentence = run_ranks(4, work)[0]
    told = r"rank 0 waited 1\.\d s for the activations of a layer from rank 1: no answer \(init_pro"
    assert re.match(told, sentence), sentence


@pytest.mark.parametrize(("world_size", "tp"), [(4, 2), (6, 3), (2, 1)])
def test_groups(world_size: int, tp: int) -> None:
    def work() -> tuple[Any, ...]:
        pcomm = load("pcomm")
        members = torch.distributed.get_process_group_ranks
        numbers = pcomm.tp_rank, pcomm.tp_degree, pcomm.dp_rank, pcomm.dp_degree
        return members(pcomm.tp_grp), members(pcomm.dp_grp), numbers

    for rank, (tp_ranks, dp_ranks, numbers) in enumerate(on_ranks(world_size, tp, work)):
        assert tp_ranks == [r for r in range(world_size) if r // tp == rank // tp]
        assert dp_ranks == [r for r in range(world_size) if r % tp == rank % tp]
        assert numbers == (rank % tp, tp, rank // tp, world_size // tp)


def test_a_world_that_does_not_divide_is_refused_on_every_rank() -> None:
    def work() -> str:
        with pytest.raises(InputError) as refusal:
            load("pcomm").init(2)
        return str(refusal.value)

    for sentence in on_ranks(3, 1, work):
        assert re.search(r"--tp 2: the 3 ranks do not divide", sentence)
