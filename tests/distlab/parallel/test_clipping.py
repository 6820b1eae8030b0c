"""The global norm of gradients that are spread over ranks, against torch's own for a whole model."""

import math

import pytest
import torch
from support.processes import run_group
from torch import Tensor, nn

from distlab.axes.grid import Grid
from distlab.axes.placement import DimSlice, FlatRange, Placement, place
from distlab.comm.context import context_of
from distlab.parallel.clipping import clip, is_too_long, sum_norm

CPU = torch.device("cpu")


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((30, 40), (50,), (1,), (7, 5, 3))]


def norm_of(gradients: list[Tensor]) -> float:
    """As one process computes it."""
    parameters = [with_gradient(grad) for grad in gradients]
    return sum_norm(parameters, Grid(0, {}), "the norm", CPU).wait()


def with_gradient(grad: Tensor, placement: Placement | None = None) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    if placement is not None:
        place(parameter, placement)
    return parameter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [1.0, 1e4])
def test_clips_as_torch_does(most: float, dtype: torch.dtype) -> None:
    ours, torchs = gradients(dtype), [nn.Parameter(torch.zeros_like(grad, dtype=torch.float32)) for grad in gradients()]
    for parameter, grad in zip(torchs, ours, strict=True):
        parameter.grad = grad.float().clone()
    expected = nn.utils.clip_grad_norm_(torchs, most).item()
    norm = norm_of(ours)
    assert norm == pytest.approx(expected, rel=1e-6)
    clip(ours, norm, most)
    for grad, parameter in zip(ours, torchs, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(grad.float(), parameter.grad, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)
    left = norm_of(ours)
    assert left == pytest.approx(min(most, norm), rel=1e-5 if dtype == torch.float32 else 1e-2)


def test_no_gradients_are_of_norm_zero() -> None:
    assert norm_of([]) == 0
    zeros = [torch.zeros(3)]
    clip(zeros, 0.0, 1.0)
    assert zeros[0].tolist() == [0, 0, 0]


SLICED, FLAT = DimSlice(0, 0, 30, ("xp",)), FlatRange(0, torch.Size([50]), ("dp",))


def sum_over_ranks(rank: int) -> tuple[list[float], list[int]]:
    """The norm of gradients that are divided in other ways, the bytes that it takes; then of one that all ranks have.

    Along xp, the first gradient is in uneven slices, which the replicas hold in parts; the second is in parts on the
    replicas; the third is of parameters of one rank along xp; the fourth of an idle parameter.
    """
    grid = Grid(rank, {"dp": 2, "xp": 3})
    replica, place = grid.axis("dp").rank, grid.axis("xp").rank
    sliced, in_parts, on_one, everywhere = gradients()
    own = sliced.tensor_split([4, 20])[place].flatten().tensor_split([7])[replica].view(-1, 1)
    parameters = [
        with_gradient(own, Placement((SLICED,), FLAT)),
        with_gradient(in_parts.tensor_split([1])[replica], Placement(flat=FLAT)),
        nn.Parameter(torch.zeros(3)),
    ]
    if place == 1:
        parameters.append(with_gradient(on_one, Placement(apart=("pp", "xp"))))
    parameters.append(with_gradient(everywhere))
    norms, sent = [], []
    for some, exact in ((parameters, False), (parameters, True), (parameters[-1:], False)):
        before = context_of().ledger.sent_bytes["gradient norm"]
        norms.append(sum_norm(some, grid, "the norm", CPU, exact).wait())
        sent.append(context_of().ledger.sent_bytes["gradient norm"] - before)
    return norms, sent


def test_each_weight_counts_once_whoever_holds_it() -> None:
    ended = run_group(6, sum_over_ranks)
    whole = torch.cat([grad.double().flatten() for grad in gradients()]).norm().item()
    everywhere = gradients()[-1].double().norm().item()
    for norms, sent in ended:
        assert norms == pytest.approx([whole, whole, everywhere], rel=1e-12)
        # A number in float64, or, to be exact, one for each place in a replica; and none of what all ranks have.
        assert sent == [2 * 5 * 8 // 6, 2 * 5 * 24 // 6, 0]
    assert len({tuple(norms) for norms, _ in ended}) == 1, "to the bit: all scale by the same"


def test_a_parameter_may_not_be_divided_along_an_axis_that_the_layout_lacks() -> None:
    parameter = with_gradient(torch.ones(4), Placement((SLICED,)))
    with pytest.raises(ValueError, match="divided along xp, which the layout lacks"):
        sum_norm([parameter], Grid(0, {"dp": 2}), "the norm", CPU)


def test_a_norm_that_is_not_finite_is_too_long() -> None:
    """So that a step which did not wait for it is taken again."""
    assert not is_too_long(1.0, 2.0)
    assert all(is_too_long(norm, 2.0) for norm in (3.0, math.inf, math.nan))
