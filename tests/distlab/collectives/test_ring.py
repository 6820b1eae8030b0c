"""The ring all-reduce: its route, and tensors of odd sizes; test_collectives compares it with the other all-reduces."""

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from support.processes import free_port, process_group, run_ranks

from distlab.collectives.ring import AHEAD, Turn, _route, allreduce_ring
from distlab.comm.names import named

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("size", "elements", "step"), [*itertools.product((2, 3, 5), (0, 1, 7, 41, 60), (1, -1))])
def test_a_rank_receives_what_the_one_before_it_sends(size: int, elements: int, step: int) -> None:
    routes = [_route(elements, 4, rank, size, step, segment_bytes=12) for rank in range(size)]
    for rank, (sizes, turns) in enumerate(routes):
        sizes_before, turns_before = routes[(rank - step) % size]
        assert sum(sizes) == elements
        assert sizes == sizes_before
        assert max(sizes) == sizes[0] <= 4  # as near to three as equal parts can be
        arriving, combined = [turn.arriving for turn in turns], [turn.arriving for turn in turns if turn.is_combined]
        assert arriving == sent_in(turns_before)
        for number, turn in enumerate(turns):
            assert len(turn.outgoing) <= (1 if number else AHEAD), "few at a time"
            assert not set(turn.outgoing) & set(combined[number:]), "sent before it has been combined"
            assert turn.is_combined or turn.arriving in sent_in(turns[:number]), "what it replaces has been sent"
        own, in_chunk = turns[0].outgoing[0], len(sizes) // size
        assert sorted([*combined, *range(own, own + in_chunk)]) == [*range(len(sizes))]
        known = combined[-in_chunk:]  # the rank's part of the result, when all is combined
        assert sorted([*arriving[len(combined) :], *known]) == [*range(len(sizes))]


def sent_in(turns: Sequence[Turn]) -> list[int]:
    return [number for turn in turns for number in turn.outgoing]


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
        for elements in (5, 1):  # of which a single one has no gaps, and the contiguous form is the view itself
            imaginary = torch.full((elements,), complex(rank, 1 + rank)).conj().imag
            allreduce_ring(imaginary)
            assert torch.equal(imaginary, expected.imag[:elements])


def messages_by_size(rank: int, port: int) -> list[int]:
    """How many messages a rank sends for a tensor of just less than 40 bytes per rank, and for one of 40."""
    counts = []
    with process_group(rank, 3, port) as context:
        for elements in (14, 15):
            with named("the tensor", str(elements)):
                allreduce_ring(torch.zeros(elements, dtype=torch.float64), both_ways_bytes=40)
            counts.append(context.ledger.messages[str(elements)])
    return counts


def test_halves_travel_both_ways_from_so_many_bytes_per_rank_on() -> None:
    assert run_ranks(3, messages_by_size, free_port()) == [[4, 8]] * 3


@pytest.mark.parametrize("size", [2, 3, 4])
def test_uneven_segments_and_complex_numbers_on_gloo(size: int) -> None:
    run_ranks(size, all_reduce_odd_sizes, size, free_port())
