"""The ring all-reduce: its route, and tensors of odd sizes; test_collectives compares it with the other all-reduces."""

import itertools

import pytest
import torch
import torch.distributed as dist
from processes import free_port, process_group, run_ranks

from distlab.ring import AHEAD, Leg, _route, allreduce_ring


@pytest.mark.parametrize(("size", "elements", "step"), [*itertools.product((2, 3, 5), (0, 1, 7, 41, 60), (1, -1))])
def test_a_rank_receives_what_the_one_before_it_sends(size: int, elements: int, step: int) -> None:
    routes = [_route(elements, 4, rank, size, step, segment_bytes=12) for rank in range(size)]
    for rank, route in enumerate(routes):
        before = routes[(rank - step) % size]
        assert sum(route.sizes) == elements
        assert route.sizes == before.sizes
        assert max(route.sizes) == route.sizes[0] <= 4  # as near to three as equal parts can be
        for leg, leg_before in ((route.combining, before.combining), (route.handing_out, before.handing_out)):
            assert arriving_at(leg) == sent_by(leg_before)
            assert all(route.sizes[number] for number in arriving_at(leg) + sent_by(leg))
            for turn, (outgoing, _) in enumerate(leg.turns):
                assert len(outgoing) <= (1 if turn else AHEAD), "few at a time"
                assert not set(outgoing) & set(arriving_at(leg)[turn:]), "sent before it has arrived"
        whole_way_round = [number for number in arriving_at(route.combining) if number not in sent_by(route.combining)]
        assert sent_by(route.handing_out)[: len(whole_way_round)] == whole_way_round, "what has been all the way round"


def arriving_at(leg: Leg) -> list[int]:
    return [number for _, number in leg.turns]


def sent_by(leg: Leg) -> list[int]:
    return [number for outgoing, _ in leg.turns for number in outgoing] + list(leg.rest)


def all_reduce_odd_sizes(rank: int, size: int, port: int) -> None:
    with process_group(rank, size, port):
        for elements in (size * (2 * AHEAD + 1) * 3 - 2, size * 3 - 1, 1, 0):
            for both_ways_bytes in (0, 1_000_000):
                tensor = torch.arange(elements) + rank
                allreduce_ring(tensor, both_ways_bytes=both_ways_bytes, segment_bytes=3 * tensor.element_size())
                assert torch.equal(tensor, size * torch.arange(elements) + sum(range(size)))
        numbers = torch.full((5,), complex(rank, 1 + rank))
        expected = numbers.conj().clone()
        dist.all_reduce(torch.view_as_real(expected))
        conjugate = numbers.conj()
        allreduce_ring(conjugate)
        assert torch.equal(conjugate, expected)
        imaginary = torch.full((5,), complex(rank, 1 + rank)).conj().imag
        allreduce_ring(imaginary)
        assert torch.equal(imaginary, expected.imag)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_uneven_segments_and_complex_numbers_on_gloo(size: int) -> None:
    run_ranks(size, all_reduce_odd_sizes, size, free_port())
