"""Data parallelism of parameters that are on different ranks: each is combined over those that hold the same."""

import pytest
import torch
import torch.distributed as dist
from support.processes import run_group
from torch import Tensor, nn
from torch.distributed import ReduceOp

from distlab.axes.grid import Grid
from distlab.axes.placement import DimSlice, Placement, place
from distlab.parallel.clipping import sum_norm
from distlab.parallel.data import Bucket, GradientBuckets
from distlab.parallel.flat import flatten_weights
from distlab.parallel.options import Sharded
from distlab.parallel.same_model import broadcast_weights, check_same_model
from distlab.parallel.sharded import ShardedDP
from simplellm.errors import InputError

LAYOUT = {"dp": 2, "xp": 3}
WAYS: list[Sharded | None] = [None, "optimizer", "gradients", "weights"]
LR, STEPS = 0.01, 2
Parameters = dict[str, Tensor]


class Net(nn.Module):
    """Different on each rank at first. Along xp, `rows` is in slices, `expert` another parameter on each rank."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        torch.manual_seed(grid.rank)
        xp = grid.axis("xp")
        self.whole, self.rows, self.expert = (nn.Parameter(torch.randn(shape)) for shape in ((5,), (2, 4), (3, 3)))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        place(self.rows, Placement((DimSlice(0, 2 * xp.rank, 6, xp.names),)))
        place(self.expert, Placement(apart=("pp", *xp.names)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.whole * x).sum() + (self.rows * x[:4] * self.frozen).sum() + (self.expert * x[2:]).sum()
        return y.square()


def data(step: int, rank: int) -> Tensor:
    return torch.randn(5, generator=torch.Generator().manual_seed(10 * step + rank))


def average(bucket: Bucket) -> dist.Work | None:
    return dist.all_reduce(bucket.flat, ReduceOp.AVG, bucket.axis.group, async_op=True)


def train(grid: Grid, way: Sharded | None) -> tuple[Parameters, list[float]]:
    """Two steps of SGD, each rank with its own data; returns the parameters and the norms."""
    net, over = Net(grid), grid.axis("dp", "xp")
    if way is None:
        broadcast_weights(net, over)
        own, forward = dict(net.named_parameters()), net.forward
        buckets = GradientBuckets(own.values(), average, over=over)
    else:
        sharded = ShardedDP(net, way, over)
        own, forward = sharded.own_parameters(), sharded.__call__
    optimizer, norms = torch.optim.SGD(own.values(), lr=LR), []
    for step in range(STEPS):
        optimizer.zero_grad()
        forward(data(step, grid.rank)).backward()
        buckets.finish() if way is None else sharded.finish_gradients()
        norms.append(sum_norm(own.values(), grid, "the norm", torch.device("cpu")).wait())
        optimizer.step()
        if way is not None:
            sharded.gather_weights()
    return {name: p.detach() for name, p in own.items()} if way is None else sharded.whole_parameters(), norms


def train_each_way(rank: int) -> list[tuple[Parameters, list[float]]]:
    grid = Grid(rank, LAYOUT)
    grid.make_groups()
    with pytest.raises(ValueError, match="the ranks along dp x xp hold different parts of the parameters"):
        flatten_weights(Net(grid), grid.axis("dp", "xp"))
    if rank in (2, 5):  # one behind the other along dp
        with pytest.raises(InputError, match=r"differ: weight float32 \[1, 2\] on rank 2 and .* on rank 5;"):
            check_same_model(nn.Linear(rank, 1), grid.axis("dp"))
    return [train(grid, way) for way in WAYS]


def train_alone() -> tuple[list[Net], list[float]]:
    """The same in one process: the model of each rank along xp, with what they hold in common."""
    nets, norms = [Net(Grid(rank, LAYOUT)) for rank in range(3)], []
    for net in nets:
        net.whole, net.frozen = nets[0].whole, nets[0].frozen
    parameters = dict.fromkeys(p for net in nets for p in net.parameters() if p.requires_grad)
    optimizer = torch.optim.SGD(parameters, lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(6):
            nets[rank % 3](data(step, rank)).backward()
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= 6 if parameter is nets[0].whole else 2
        norms.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm().item())
        optimizer.step()
    return nets, norms


def test_each_parameter_is_combined_over_the_ranks_that_hold_the_same() -> None:
    nets, expected_norms = train_alone()
    for rank, ended in enumerate(run_group(6, train_each_way)):
        for way, (parameters, norms) in zip(WAYS, ended, strict=True):
            assert norms == pytest.approx(expected_norms, rel=1e-5), f"on rank {rank}, with {way}"
            for (name, own), start in zip(parameters.items(), Net(Grid(rank % 3, LAYOUT)).parameters(), strict=True):
                expected = nets[rank % 3].get_parameter(name)
                torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6, msg=f"{name} of rank {rank}, {way}")
                assert name in ("whole", "frozen") or not torch.equal(own, start), f"{name} was trained"
