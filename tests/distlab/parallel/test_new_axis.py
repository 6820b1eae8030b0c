"""An axis that the library does not know, "xp": along it one matrix is in slices of rows, all else is replicated."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_group
from torch import nn

from distlab.axes.grid import Grid
from distlab.axes.layout import coordinate
from distlab.axes.placement import DimSlice, Placement, place
from distlab.checkpoints import format, saving
from distlab.parallel.clipping import clip, sum_norm
from distlab.parallel.data import Bucket, GradientBuckets
from distlab_compare.saved import by_step


class Rows(torch.autograd.Function):
    """The whole matrix from its slices. Each rank uses it for other data, so the gradient is the mean over ranks."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, axis: Any) -> torch.Tensor:
        ctx.axis, whole = axis, torch.cat([own * (number == axis.rank) for number in range(axis.size)])
        dist.all_reduce(whole, group=axis.group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dist.all_reduce(mean := grad.clone(), dist.ReduceOp.AVG, ctx.axis.group)
        return mean.chunk(ctx.axis.size)[ctx.axis.rank], None


def average(bucket: Bucket) -> Any:
    return dist.all_reduce(bucket.flat, dist.ReduceOp.AVG, bucket.axis.group, async_op=True)


def run(grid: Grid, steps: range, folder: Path, resumed: bool = False) -> tuple[list[float], list[torch.Tensor]]:
    """Train, and save at the end; returns the norms of the gradients, and the parameters."""
    axis, xp = grid.axis("dp", "xp"), grid.axis("xp")
    wholes = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).split([1, 6])
    first, rows = (nn.Parameter(part.clone()) for part in (wholes[0], wholes[1].chunk(xp.size)[xp.rank]))
    place(rows, Placement((DimSlice(0, 6 // xp.size * xp.rank, 6, xp.names),)))
    own, optimizer, norms = {"first": first, "rows": rows}, torch.optim.SGD([first, rows], lr=0.5), list[float]()
    if resumed:
        saving.restore(format.latest_valid(folder), own, optimizer, grid.rank, grid.layout)
    buckets = GradientBuckets(own.values(), average, over=axis)
    for step in steps:
        batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(step)).chunk(axis.size)[axis.rank]
        optimizer.zero_grad()
        (torch.tanh(batch * first) @ Rows.apply(rows, xp).T).square().mean().backward()
        buckets.finish()
        norms.append(sum_norm(own.values(), grid, "the norm", torch.device("cpu")).wait())
        clip([p.grad for p in own.values() if p.grad is not None], norms[-1], 0.5)
        optimizer.step()
    model = {"activation": "tanh", "bias": False, "slope": 0.1}  # not only sizes
    record = {"architecture": "net", "step": steps.stop, "unit": "rows", "rows": 1, "model": model, "settings": {}}
    saving.save(folder, saving.state_of(own, optimizer, grid.rank, False), record, None, keep=9)
    return norms, [first.detach(), rows.detach()]


def run_rank(rank: int, layout: dict[str, int], folder: Path) -> list[float]:
    grid = Grid(rank, layout)
    grid.make_groups("dp", "xp")
    return run(grid, range(3), folder)[0]


@pytest.mark.parametrize("layout", [{"dp": 2, "xp": 3}, {"xp": 3, "dp": 2}, {"xp": 3}])
def test_trains_as_one_process_and_resumes_without_the_axis(layout: dict[str, int], tmp_path: Path) -> None:
    norms, parameters = run(Grid(0, {}), range(5), tmp_path / "alone")
    assert min(norms) > 0.5, "all gradients are clipped"
    for own in run_group(Grid(0, layout).size, run_rank, layout, tmp_path / "run"):
        assert own == pytest.approx(norms[:3], rel=1e-5)
    saved = by_step(tmp_path / "run")[3]
    for number in range(3):
        wrong = torch.zeros(6, 6, dtype=torch.bool)
        wrong[2 * number] = True
        [writer] = saved.writers("rows", wrong)
        assert coordinate(layout, writer, "xp") == number
    assert len(saved.writers("rows", torch.ones(6, 6, dtype=torch.bool))) == 3
    resumed, after = run(Grid(0, {}), range(3, 5), tmp_path / "run", resumed=True)
    assert resumed == pytest.approx(norms[3:], rel=1e-5)
    assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(after, parameters, strict=True))
