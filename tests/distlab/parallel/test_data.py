"""MyDP, gradient buckets and the weights' check: tied, frozen and idle parameters, any world."""

import copy

import pytest
import torch
from processes import free_port, process_group, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.parallel.data import (
    Bucket,
    GradientBuckets,
    MyDP,
    broadcast_weights,
    check_parameter_closeness,
    flatten_weights,
)


class Tied(nn.Module):
    """An embedding that is also the head, a frozen layer, and a layer that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.sometimes = nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4))

    def forward(self, ids: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.frozen(self.embed(ids)) + self.shift
        if (ids == 0).any():
            x = x + self.sometimes(x)
        logits = self.head(torch.tanh(x))
        return logits if target is None else nn.functional.cross_entropy(logits, target)


IDS = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 1, 3, 2, 2, 2], [3, 3, 0, 1, 5, 6]])


def train_mydp(rank: int, world_size: int, port: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with process_group(rank, world_size, port):
        model = MyDP(Tied())  # different weights on every rank, until MyDP gives all of them rank 0's
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        initial = copy.deepcopy(model.model.state_dict())
        for _ in range(3):
            optimizer.zero_grad()
            ids = IDS[rank % len(IDS)]
            model(ids, ids.roll(1)).backward()
            optimizer.step()
        assert check_parameter_closeness(model)
        return initial, model.model.state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_mydp_trains_as_one_process(world_size: int) -> None:
    ended = run_ranks(world_size, train_mydp, world_size, free_port())
    initial = ended[0][0]
    model = Tied()
    model.load_state_dict(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.stack([model(IDS[rank], IDS[rank].roll(1)) for rank in range(world_size)]).mean()
        loss.backward()
        optimizer.step()
    for own_initial, own in ended:
        for name, expected in model.state_dict().items():
            assert torch.equal(own_initial[name], initial[name]), f"{name} starts as on rank 0"
            torch.testing.assert_close(own[name], expected, msg=lambda m, name=name: f"{name}: {m}")
    assert torch.equal(model.frozen.weight, initial["frozen.weight"])
    for name in ("embed.weight", "sometimes.weight"):
        assert not torch.allclose(model.state_dict()[name], initial[name]), f"{name} was trained"


def accumulate(rank: int, world_size: int, port: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Two backward passes without zero_grad() in between, with MyDP and with torch's wrapper."""
    with process_group(rank, world_size, port):
        plain = nn.Linear(3, 2)
        broadcast_weights(plain)
        mine, torchs = MyDP(copy.deepcopy(plain)), DistributedDataParallel(copy.deepcopy(plain))
        for factor in (1.0, 2.0):
            x = torch.arange(3.0) * factor + rank
            for model in (mine, torchs):
                model(x).square().sum().backward()
        return {
            name: (p.grad, q.grad)
            for (name, p), q in zip(mine.model.named_parameters(), torchs.parameters(), strict=True)
            if p.grad is not None and q.grad is not None
        }


def test_mydp_accumulates_gradients_as_torchs_wrapper_does() -> None:
    for gradients in run_ranks(2, accumulate, 2, free_port()):
        assert set(gradients) == {"weight", "bias"}
        for mine, torchs in gradients.values():
            assert torchs.abs().max() > 0
            torch.testing.assert_close(mine, torchs)


def differ_in(rank: int, port: int, what: str) -> tuple[bool, bool]:
    """Whether the check passes before and after rank 1 changes one weight."""
    with process_group(rank, 3, port):
        model = Tied()
        broadcast_weights(model)
        before = check_parameter_closeness(model)
        if rank == 1:
            with torch.no_grad():
                model.get_parameter(what)[-1] += 0.01
        return before, check_parameter_closeness(model)


@pytest.mark.parametrize("what", ["embed.weight", "frozen.bias", "sometimes.weight"])
def test_closeness_sees_a_weight_that_differs_on_one_rank(what: str) -> None:
    assert run_ranks(3, differ_in, free_port(), what) == [(True, False)] * 3


def differ_in_shape(rank: int, port: int) -> bool:
    with process_group(rank, 2, port):
        other_size = check_parameter_closeness(nn.Linear(2 + rank, 2))
        transposed = check_parameter_closeness(nn.Linear(2 + rank, 3 - rank, bias=False))
        return other_size or transposed


def test_closeness_of_models_of_different_shapes_is_false_and_does_not_hang() -> None:
    assert run_ranks(2, differ_in_shape, free_port()) == [False, False]


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
        buckets.flush()
    assert [gradient.tolist() for gradient in full] == [[1.0, 1.0, 0.0], [10.0, 10.0, 0.0]]


def test_flush_gives_idle_parameters_a_gradient_of_zero_also_after_they_were_used() -> None:
    used, idle = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    sums: list[float] = []
    buckets = GradientBuckets(
        [*used.parameters(), *idle.parameters()], lambda bucket: sums.append(bucket.flat.abs().sum().item())
    )
    for layers in ([used, idle], [used]):
        used.zero_grad()
        idle.zero_grad()
        torch.stack([layer(torch.ones(2)).sum() for layer in layers]).sum().backward()
        buckets.flush()
    assert sums == [8.0, 4.0]


def test_parameters_become_views_of_the_flat_weights() -> None:
    model = Tied()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = flatten_weights(model)
    assert flat.numel() == sum(p.numel() for p in model.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name])
    assert model.head.weight is model.embed.weight
    flat += 1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name] + 1)
