"""The global norm of gradients that are spread over ranks, against torch's own for a whole model."""

import math

import pytest
import torch
from support.processes import free_port, process_group, run_ranks
from torch import Tensor, nn

from distlab.comm.traffic import traffic
from distlab.parallel.clipping import Held, clip, squared_norm, sum_norm

CPU = torch.device("cpu")


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((30, 40), (50,), (1,), (7, 5, 3))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [1.0, 1e4])
def test_clips_as_torch_does(most: float, dtype: torch.dtype) -> None:
    ours, torchs = gradients(dtype), [nn.Parameter(torch.zeros_like(grad, dtype=torch.float32)) for grad in gradients()]
    for parameter, grad in zip(torchs, ours, strict=True):
        parameter.grad = grad.float().clone()
    expected = nn.utils.clip_grad_norm_(torchs, most).item()
    norm = math.sqrt(squared_norm([(grad, 1) for grad in ours], CPU).item())
    assert norm == pytest.approx(expected, rel=1e-6)
    clip(ours, norm, most)
    for grad, parameter in zip(ours, torchs, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(grad.float(), parameter.grad, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)
    left = math.sqrt(squared_norm([(grad, 1) for grad in ours], CPU).item())
    assert left == pytest.approx(min(most, norm), rel=1e-5 if dtype == torch.float32 else 1e-2)


def test_no_gradients_are_of_norm_zero() -> None:
    assert squared_norm([], CPU).item() == 0
    zeros = [torch.zeros(3)]
    clip(zeros, 0.0, 1.0)
    assert zeros[0].tolist() == [0, 0, 0]


def sum_over_ranks(rank: int, world_size: int, port: int) -> tuple[float, int]:
    """The first gradient is in uneven slices, the second on all ranks, the third on rank 1, the fourth on two ranks."""
    with process_group(rank, world_size, port):
        sliced, everywhere, on_one, on_two = gradients()
        held: list[Held] = [(sliced.tensor_split([4, 20])[rank], 1), (everywhere, world_size)]
        held += [(on_one, 1)] if rank == 1 else []
        held += [(on_two, 2)] if rank != 1 else []
        before = traffic.ledger.sent_bytes["gradient norm"]
        return sum_norm(held, "the norm", CPU).wait(), traffic.ledger.sent_bytes["gradient norm"] - before


def test_each_weight_counts_once_whoever_holds_it() -> None:
    ended = run_ranks(3, sum_over_ranks, 3, free_port())
    expected = torch.cat([grad.double().flatten() for grad in gradients()]).norm().item()
    assert [norm for norm, _ in ended] == [pytest.approx(expected, rel=1e-6)] * 3
    assert len({norm for norm, _ in ended}) == 1, "to the bit: all scale by the same"
    assert {sent for _, sent in ended} == {2 * 2 * 8 // 3}, "one number in float64"
