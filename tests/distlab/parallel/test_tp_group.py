"""What the ranks of a tp_group tell each other: forward and backward, and in the ledger."""

from collections.abc import Callable

import pytest
import torch
from support.processes import run_group
from torch import Tensor

from distlab.axes.layout import equal_parts
from distlab.comm.context import TransportName, context_of
from distlab.parallel.tp_group import (
    LAYERS,
    TPGroup,
    copy_to,
    gather,
    gather_to,
    reduce_from,
    reduce_scatter,
)

pytestmark = pytest.mark.quick

TRANSPORTS: list[TransportName] = ["gloo", "shared"]


def test_shares_are_those_of_tensor_split() -> None:
    for total in (0, 1, 5, 4096):
        for ranks in (1, 2, 3, 6, 7):
            assert equal_parts(total, ranks) == [len(part) for part in torch.arange(total).tensor_split(ranks)]


def exchange(rank: int, ranks: int, transport: TransportName) -> tuple[list[Tensor], dict[str, int]]:
    """Each function on slices of 7 rows, against what one process would compute from all ranks' inputs.

    Returns what each function gives forward and backward, and the bytes sent.
    """
    results: list[Tensor] = []
    tp_group, length = TPGroup("a layer", LAYERS), 7
    generator = torch.Generator().manual_seed(0)
    wholes = torch.randn(ranks, 2, length, 4, generator=generator)  # what each rank has before the function
    factors = torch.randn(ranks, 2, length, 4, generator=generator)  # each rank's gradient of what comes after
    first, last = tp_group.own_range(length)
    mine = slice(None), slice(first, last)
    total, total_factor = wholes.sum(0), factors.sum(0)
    whole, factor = wholes[rank], factors[rank]
    cases: list[tuple[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor, Tensor]] = [
        # the function, its input and what it gives; the gradient of that and what it gives
        (lambda x: gather(x, tp_group, length, dim=1), wholes[0][mine], wholes[0], factors[0], factors[0][mine]),
        (lambda x: gather_to(x, tp_group, length), wholes[0][mine], wholes[0], factor, total_factor[mine]),
        (lambda x: reduce_scatter(x, tp_group), whole, total[mine], factors[0][mine], factors[0]),
        (lambda x: copy_to(x, tp_group), whole, whole, factor, total_factor),
        (lambda x: reduce_from(x, tp_group), whole, total, factor, factor),
    ]
    own_part = tp_group.own_parameter(whole, dim=1)
    assert torch.equal(own_part, whole[mine])
    assert own_part.untyped_storage().nbytes() == own_part.nbytes, "the whole can be freed"
    for function, x, y, grad_y, grad_x in cases:
        own, grad = (given.mT.contiguous().mT for given in (x, grad_y))  # not contiguous themselves
        own.requires_grad_()
        result = function(own)
        result.backward(grad)
        torch.testing.assert_close(result, y)
        torch.testing.assert_close(own.grad, grad_x)
        assert torch.equal(own, x), "the input is unchanged"
        assert torch.equal(grad, grad_y), "the gradient is unchanged"
        assert own.grad is not None
        results += [result.detach(), own.grad]
    context = context_of()
    assert context.shares_memory == (transport == "shared" and ranks > 1)
    return results, dict(context.ledger.sent_bytes)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_functions_forward_and_backward_over_gloo_and_in_shared_memory(ranks: int) -> None:
    over_gloo, shared = (run_group(ranks, exchange, ranks, way, transport=way) for way in TRANSPORTS)
    for (results, sent_bytes), (same, same_bytes) in zip(over_gloo, shared, strict=True):
        for result, other in zip(results[:-4], same[:-4], strict=True):  # all but the all-reduces'
            torch.testing.assert_close(result, other, rtol=0, atol=0)
        assert sent_bytes == same_bytes
