"""Gradient buckets: when they are handed over, in which order, and what is written into them."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import run_group
from torch import Tensor, nn
from torch.distributed import ReduceOp

from distlab.collectives.algorithms import ALL_REDUCES
from distlab.comm.names import named
from distlab.comm.pending import Pending
from distlab.parallel.data import Bucket, GradientBuckets
from simplellm.layers import Linear

pytestmark = pytest.mark.quick


def test_gradients_of_another_dtype_have_a_bucket_of_their_own() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2)])
    buckets = list(GradientBuckets(model.parameters(), lambda _: None))
    assert [(bucket.flat.dtype, len(bucket.flat)) for bucket in buckets] == [(torch.bfloat16, 6), (torch.float32, 12)]


def test_buckets_are_handed_over_during_the_backward_pass_from_the_last_layer_to_the_first() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    order: list[int] = []
    missing: list[int] = []

    def on_full(bucket: Bucket) -> None:
        order.append(bucket.index)
        missing.append(sum(p.grad is None for p in model.parameters()))

    buckets = GradientBuckets(model.parameters(), on_full, bucket_bytes=4 * 4 * 4)
    model(torch.ones(2, 4)).sum().backward()
    assert order == [0, 1, 2, 3]
    assert missing == [3, 2, 1, 0], "a bucket does not wait for the layers before it"
    for bucket, layer in zip(buckets, reversed(model), strict=True):
        weight = layer.get_parameter("weight")
        assert weight.grad is not None
        assert weight.grad.data_ptr() == bucket.flat.data_ptr(), "the gradient is a view of the bucket"
        assert bucket.flat.abs().max() > 0


def test_a_bucket_is_full_after_all_backward_passes() -> None:
    layer = nn.Linear(3, 1, bias=False)
    full: list[Tensor] = []
    buckets = GradientBuckets(layer.parameters(), lambda bucket: full.append(bucket.flat.clone()), backward_passes=2)
    for step in (1.0, 10.0):
        layer.zero_grad()
        layer(torch.tensor([step, 0.0, 0.0])).backward()
        layer(torch.tensor([0.0, step, 0.0])).backward()
        buckets.finish()
    assert [gradient.tolist() for gradient in full] == [[1.0, 1.0, 0.0], [10.0, 10.0, 0.0]]


def test_every_round_hands_over_every_bucket_also_of_a_layer_that_it_leaves_idle() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    order: list[int] = []
    buckets = GradientBuckets(layers.parameters(), lambda bucket: order.append(bucket.index), bucket_bytes=1, rounds=2)
    for _ in range(2):  # steps
        order.clear()
        layers_in_order(layers, [0, 1, 2]).backward()
        assert order == [0, 1, 2]
        layers_in_order(layers, [0, 1]).backward()
        assert order == [0, 1, 2], "the first, of the idle layer, is not full"
        buckets.finish()
        assert order == [0, 1, 2, 0, 1, 2]


def test_finish_gives_idle_parameters_a_gradient_of_zero_also_after_they_were_used() -> None:
    used, idle = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    sums: list[float] = []
    buckets = GradientBuckets(
        [*used.parameters(), *idle.parameters()], lambda bucket: sums.append(bucket.flat.abs().sum().item())
    )
    for layers in ([used, idle], [used]):
        used.zero_grad()
        idle.zero_grad()
        torch.stack([layer(torch.ones(2)).sum() for layer in layers]).sum().backward()
        buckets.finish()
    assert sums == [8.0, 4.0]


ORDERS = [0, 1, 2], [2, 0, 1], [1, 0]  # in which each of three ranks uses the layers; the last one leaves one idle


def layers_in_order(layers: nn.ModuleList, order: list[int]) -> Tensor:
    x = torch.linspace(-1, 1, 4)
    for index in order:
        x = torch.tanh(layers[index](x))
    return x.square().sum()


def mean_gradients(layers: nn.ModuleList) -> list[Tensor]:
    """The mean of all ranks' gradients, computed by one."""
    weights = list(layers.parameters())
    ranks = [torch.autograd.grad(layers_in_order(layers, order), weights, allow_unused=True) for order in ORDERS]
    return [
        torch.stack([torch.zeros_like(weight) if grad is None else grad for grad in grads]).mean(0)
        for weight, grads in zip(weights, zip(*ranks, strict=True), strict=True)
    ]


def test_buckets_are_handed_over_in_order_when_they_fill_in_another() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    order: list[int] = []
    buckets = GradientBuckets(layers.parameters(), lambda bucket: order.append(bucket.index), bucket_bytes=1)
    layers_in_order(layers, [2, 1, 0]).backward()
    assert order == [0, 1, 2], "though the last has been full first"
    buckets.finish()
    order.clear()
    layers_in_order(layers, [0, 1]).backward()
    assert order == [], "the first, of the idle layer, is not full"
    buckets.finish()
    assert order == [0, 1, 2]


def average_in_other_orders(rank: int, by_hand: str | None) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def average(bucket: Bucket) -> Pending | None:
        with named(str(bucket), "gradients"):
            if by_hand is None:
                return dist.all_reduce(bucket.flat, ReduceOp.AVG, async_op=True)
            ALL_REDUCES[by_hand](bucket.flat, ReduceOp.SUM)
            bucket.flat.div_(3)
            return None

    buckets = GradientBuckets(layers.parameters(), on_full=average, bucket_bytes=1)
    for _ in range(2):
        layers.zero_grad()
        layers_in_order(layers, ORDERS[rank]).backward()
        buckets.finish()
        for weight, expected in zip(layers.parameters(), mean_gradients(layers), strict=True):
            assert expected.abs().max() > 1e-3
            torch.testing.assert_close(weight.grad, expected)
        with torch.no_grad():
            for weight in layers.parameters():
                assert weight.grad is not None
                weight.sub_(0.5 * weight.grad)


@pytest.mark.parametrize("by_hand", [None, *ALL_REDUCES])
def test_gradients_are_averaged_whatever_the_order_in_which_ranks_use_the_layers(by_hand: str | None) -> None:
    run_group(3, average_in_other_orders, by_hand)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_linear_layer_that_is_used_twice_in_a_pass(set_to_none: bool) -> None:
    torch.manual_seed(0)
    model = Linear(4, 4, bias=False)
    nn.init.normal_(model.weight)
    plain = copy.deepcopy(model)
    buckets = GradientBuckets(model.parameters(), on_full=lambda _: None, backward_passes=2)
    for _ in range(2):
        model.zero_grad(set_to_none)
        plain.zero_grad()
        for number in range(2):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number), requires_grad=True)
            for net in (model, plain):
                net(net(x)).square().sum().backward()
        buckets.finish()
        assert plain.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, plain.weight.grad)


def test_a_saved_parameter_has_no_bucket(tmp_path: Path) -> None:
    model = Linear(3, 2, bias=False)
    nn.init.normal_(model.weight)
    GradientBuckets(model.parameters(), on_full=lambda _: None)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for number in range(2):
        loaded(torch.full((1, 3), float(number), requires_grad=True)).sum().backward()
    assert torch.equal(loaded.weight.grad, torch.ones(2, 3))
