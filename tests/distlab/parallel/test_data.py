"""MyDP, gradient buckets and the weights' check: tied, frozen and idle parameters, any world."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.mixed_model import Mixed
from support.processes import run_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.comm.context import context_of
from distlab.parallel.data import MyDP
from distlab.parallel.flat import GradientSums, flatten_gradients, flatten_weights
from distlab.parallel.flat_parameters import shards_of
from distlab.parallel.same_model import broadcast_weights, check_parameter_closeness
from distlab.parallel.sharded import ShardedDP
from simplellm.errors import InputError

pytestmark = pytest.mark.quick


IDS = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 1, 3, 2, 2, 2], [3, 3, 0, 1, 5, 6]])


def train_mydp(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = MyDP(Mixed())  # different weights on every rank, until MyDP gives all of them rank 0's
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    initial = copy.deepcopy(model.model.state_dict())
    for _ in range(3):
        optimizer.zero_grad()
        model(IDS[rank], IDS[rank].roll(1)).backward()
        optimizer.step()
    assert check_parameter_closeness(model)
    return initial, model.model.state_dict()


def test_mydp_trains_as_one_process() -> None:
    ended = run_group(len(IDS), train_mydp)
    initial = ended[0][0]
    model = Mixed()
    model.load_state_dict(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.stack([model(ids, ids.roll(1)) for ids in IDS]).mean()
        loss.backward()
        optimizer.step()
    for own_initial, own in ended:
        for name, expected in model.state_dict().items():
            assert torch.equal(own_initial[name], initial[name]), f"{name} starts as on rank 0"
            torch.testing.assert_close(own[name], expected, msg=f"{name}: {{}}".format)
    assert torch.equal(model.frozen.weight, initial["frozen.weight"])
    for name in ("embed.weight", "sometimes.weight"):
        assert not torch.allclose(model.state_dict()[name], initial[name]), f"{name} was trained"


def accumulate(rank: int, world_size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Two backward passes without zero_grad() in between, with MyDP and with torch's wrapper."""
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
    for gradients in run_group(2, accumulate, 2):
        assert set(gradients) == {"weight", "bias"}
        for mine, torchs in gradients.values():
            assert torchs.abs().max() > 0
            torch.testing.assert_close(mine, torchs)


def differ_in(rank: int, what: str) -> tuple[bool, bool]:
    """Whether the check passes before and after rank 1 changes one weight."""
    model = Mixed()
    model.embed.weight.data[0] = torch.nan  # the same on all ranks, too
    broadcast_weights(model)
    before = check_parameter_closeness(model)
    if rank == 1:
        with torch.no_grad():
            model.get_parameter(what)[-1] += 1e-4
    return before, check_parameter_closeness(model)


@pytest.mark.parametrize("what", ["embed.weight", "frozen.bias", "sometimes.weight"])
def test_closeness_sees_a_weight_that_differs_on_one_rank(what: str) -> None:
    assert run_group(3, differ_in, what) == [(True, False)] * 3


def differ_in_shape(rank: int) -> bool:
    other_size = check_parameter_closeness(nn.Linear(2 + rank, 2))
    transposed = check_parameter_closeness(nn.Linear(2 + rank, 3 - rank, bias=False))
    return other_size or transposed


def test_closeness_of_models_of_different_shapes_is_false_and_does_not_hang() -> None:
    assert run_group(2, differ_in_shape) == [False, False]


class Raises(torch.autograd.Function):
    """Nothing, until its backward pass is to raise."""

    wanted = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Raises.wanted:
            raise ZeroDivisionError
        return grad


def raise_and_train(rank: int, bucket_bytes: int) -> None:
    first, last = nn.Linear(3, 4), nn.Linear(4, 2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x: Tensor) -> Tensor:
            return last(Raises.apply(torch.tanh(first(x)))).square().sum()

    model = MyDP(Model(), bucket_bytes)
    inputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad((model.model(inputs[0]) + model.model(inputs[1])) / 2, [*model.parameters()])
    for raises in (False, True, True, False, False):
        model.zero_grad()
        Raises.wanted = raises
        loss = model(inputs[rank])
        if raises:
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            continue
        messages = context_of().ledger.messages.copy()
        loss.backward()
        assert (context_of().ledger.messages - messages)["gradients"] == (4 if bucket_bytes == 1 else 1)
        for parameter, mean in zip(model.parameters(), expected, strict=True):
            assert mean.abs().max() > 1e-3
            torch.testing.assert_close(parameter.grad, mean)


@pytest.mark.parametrize("bucket_bytes", [1, 25_000_000])
def test_mydp_averages_again_after_a_backward_pass_that_raised(bucket_bytes: int) -> None:
    run_group(2, raise_and_train, bucket_bytes)


def broadcast_with_strides(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.transposed = nn.Parameter(torch.randn(3, 4).t())
    model.register_buffer("every_other", torch.randn(6)[::2])
    strided = [name for name, tensor in model.state_dict().items() if not tensor.is_contiguous()]
    assert sorted(strided) == ["every_other", "transposed", "weight"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    broadcast_weights(model)
    assert [name for name, tensor in model.state_dict().items() if not tensor.is_contiguous()] == strided
    return before, model.state_dict()


def test_weights_that_are_not_contiguous_are_broadcast_as_well() -> None:
    ranks = run_group(3, broadcast_with_strides)
    for own, after in ranks:
        for name, rank_0s in ranks[0][0].items():
            assert own is ranks[0][0] or not torch.equal(own[name], rank_0s), f"{name} is another on each rank"
            assert torch.equal(after[name], rank_0s), name


def test_parameters_become_views_of_the_flat_weights() -> None:
    model = Mixed()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = flatten_weights(model)
    assert flat.numel() == sum(p.numel() for p in model.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name])
    assert model.head.weight is model.embed.weight
    flat += 1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name] + 1)
    assert flatten_gradients(model).numel() == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model.frozen.weight.grad is None, "or weight decay would change it"


def test_sums_of_gradients_each_have_their_micro_batches_and_the_total_is_the_gradient() -> None:
    layer = nn.Linear(2, 1, bias=False)
    gradients = GradientSums(layer, sums=2, micro_batches=4)
    for scale in (1.0, 10.0):
        gradients.flat.zero_()
        for micro_batch in (0, 3, 1, 2):
            if micro_batch > 0:  # a step begins with the first sum
                gradients.use(micro_batch)
            layer(scale * torch.tensor([1.0, 2.0**micro_batch])).backward()
        assert gradients.flat.tolist() == [[2 * scale, 3 * scale], [2 * scale, 12 * scale]]
        total = gradients.total()
        total /= 2
        assert torch.as_tensor(layer.weight.grad).tolist() == [[2 * scale, 7.5 * scale]]


def test_ranges_that_do_not_fit_a_model_are_refused() -> None:
    model = Mixed()
    flat = flatten_weights(model)
    with pytest.raises(ValueError, match="a frozen parameter has no gradient"):
        shards_of(model, flat, flat)
    model.requires_grad_()
    for weights, gradients, what in ((flat, flat[:-1], "gradients"), (torch.cat([flat, flat]), flat, "weights")):
        with pytest.raises(ValueError, match=f"range of the {what} has {len(flat)} elements, not"):
            shards_of(model, weights, gradients)


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another width": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "0.weight float32 [4, 3]"),
    "the same size, transposed": (lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), "0.weight float32 [3, 5]"),
    "another dtype": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).bfloat16()), "1.weight bfloat16 [2, 5]"),
    "a layer more": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2)), "2.weight float32 [2"),
    "no bias": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False)), "nothing more"),
    "a frozen layer": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).requires_grad_(False)),
        "1.weight float32 [2, 5], not trained",
    ),
    "no parameters": (nn.Identity, "nothing more"),
}


def wrap_different(rank: int, how: str) -> list[str]:
    """What each wrapper says of a model that rank 1 has built in another way."""
    said = []
    wraps: list[Callable[[nn.Module], object]] = [MyDP, flatten_weights, flatten_gradients]
    wraps += [lambda net: ShardedDP(net, "weights"), lambda net: ShardedDP(net, "optimizer")]
    wraps += [lambda net: ShardedDP(net, "weights", initial=net.get_parameter), lambda net: GradientSums(net, 1, 1)]
    for wrap in wraps:
        net = DIFFERENT[how][0]() if rank == 1 else nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        with pytest.raises(InputError) as refused:
            wrap(net)
        said.append(str(refused.value))
    return said


@pytest.mark.parametrize("how", DIFFERENT)
def test_ranks_with_different_models_are_told_the_first_parameter_that_differs(how: str) -> None:
    ended = run_group(3, wrap_different, how)
    for sentence in [sentence for said in ended for sentence in said]:
        assert sentence.startswith("the ranks' models differ: "), sentence
        assert f"{DIFFERENT[how][1]}" in sentence.partition(" on rank 0 and ")[2], sentence
        assert sentence.endswith(" on rank 1; build the same model on all ranks")
    assert len({tuple(said) for said in ended}) == 1, "the same on all ranks"
