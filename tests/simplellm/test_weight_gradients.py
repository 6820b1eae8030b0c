"""Weight gradients that the matrix product writes where they belong, against those that autograd adds up."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simplellm import layers
from simplellm.layers import Linear
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.weight_gradients import DeferredWeightGradients, WeightGradients, is_by_hand

pytestmark = pytest.mark.quick

VOCAB = 40
IDS = torch.arange(18).view(3, 6) % VOCAB


def layer(seed: int = 0) -> Linear:
    linear = Linear(5, 4, bias=False)
    nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(seed))
    return linear


def inputs(number: int) -> Tensor:
    return torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(number)).requires_grad_()


def grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


class Place:
    """A place in a larger buffer, free again when the gradient has been collected."""

    def __init__(self, weight: Tensor) -> None:
        self.buffer, self.is_free = torch.full((1 + weight.numel(),), torch.nan), True
        self.view = self.buffer[1:].view_as(weight)
        weight.gradient_place = self  # type: ignore[attr-defined]
        weight.register_post_accumulate_grad_hook(self.collect)

    def take(self) -> Tensor | None:
        was_free, self.is_free = self.is_free, False
        return self.view if was_free else None

    def collect(self, weight: Tensor) -> None:
        self.is_free = True


def test_micro_batches_are_added_up_in_one_tensor_to_the_gradients_of_autograd() -> None:
    nets = [LLama(CausalLLama, VOCAB, dmodel=12, num_heads=2, n_layers=2, ctx_size=6) for _ in range(2)]
    in_place, plain = nets
    where: list[dict[str, int]] = []
    for ids in IDS.split(1):
        with WeightGradients().applied():
            loss = causalLLMLoss(in_place(ids), ids, VOCAB)
        loss.backward()
        causalLLMLoss(plain(ids), ids, VOCAB).backward()
        where.append({name: grad(p).data_ptr() for name, p in in_place.named_parameters() if "proj" in name})
    assert where[0] == where[1] == where[2], "no new tensor takes the place of the sum"
    for (name, own), other in zip(in_place.named_parameters(), plain.parameters(), strict=True):
        assert grad(other).abs().max() > 1e-4, name
        torch.testing.assert_close(own.grad, other.grad, msg=f"{name}: {{}}".format)


def test_a_first_gradient_is_written_to_its_place_without_a_copy() -> None:
    linear, plain = layer(), layer()
    place = Place(linear.weight)
    for number in range(2):
        linear(inputs(number)).square().sum().backward()
        plain(inputs(number)).square().sum().backward()
        assert grad(linear.weight).data_ptr() == place.view.data_ptr()
        torch.testing.assert_close(place.view, grad(plain.weight))
    assert place.buffer[0].isnan()


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_weight_that_is_used_twice_in_a_pass_gets_the_sum_of_both(is_deferred: bool) -> None:
    linear, plain = layer(), layer()
    Place(linear.weight)
    for number in range(3):
        if number == 2:  # zeros in the place, to which the next gradient is added
            grad(linear.weight).zero_()
            grad(plain.weight).zero_()
        later = DeferredWeightGradients()
        for net in (linear, plain):
            x = inputs(number)
            with later.applied() if net is linear and is_deferred else contextlib.nullcontext():
                loss = net(x).square().sum() + net(2 * x).sum()
            loss.backward()
        later.compute()
        torch.testing.assert_close(grad(linear.weight), grad(plain.weight))


def test_what_is_not_asked_for_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x, calls = layer(), inputs(0), list[bool]()
    real: Any = layers.gradient_of

    def note(*args: Any, in_place: bool) -> Tensor:
        calls.append(in_place)
        return real(*args, in_place)

    monkeypatch.setattr(layers, "gradient_of", note)
    with WeightGradients().applied():
        y = linear(x).square().sum()
    torch.autograd.grad(y, x, retain_graph=True)
    assert calls == []
    torch.autograd.grad(y, linear.weight, retain_graph=True)
    y.backward()
    assert calls == [False, True]


def test_inputs_of_one_dimension() -> None:
    linear, plain, x = layer(), layer(), torch.ones(5, requires_grad=True)
    with WeightGradients().applied():
        y = linear(x).square().sum()
    y.backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(grad(linear.weight), grad(plain.weight))


@pytest.mark.parametrize("of_weight", [True, False])
def test_torch_autograd_grad_leaves_the_sum_alone(of_weight: bool) -> None:
    linear, x = layer(), inputs(0)
    with WeightGradients().applied():
        y = linear(x).square().sum()
        linear(inputs(1)).sum().backward()
    before = grad(linear.weight).clone()
    (found,) = torch.autograd.grad(y, linear.weight if of_weight else x)
    (expected,) = torch.autograd.grad(layer()(x).square().sum(), x) if not of_weight else (None,)
    if expected is None:
        plain = layer()
        plain(x).square().sum().backward()
        expected = grad(plain.weight)
    torch.testing.assert_close(found, expected)
    assert torch.equal(grad(linear.weight), before)


def test_backward_with_inputs_adds_to_those_only() -> None:
    """As an action does that computes the gradients of inputs and of weights in two passes."""
    linear, x, plain = layer(), inputs(0), layer()
    for number in range(2):
        with WeightGradients().applied():
            y = linear(x).square().sum()
        (of_x,) = torch.autograd.grad(y, x, retain_graph=True)
        y.backward(inputs=[linear.weight])
        plain(x).square().sum().backward()
        assert of_x.abs().max() > 0
        torch.testing.assert_close(grad(linear.weight), grad(plain.weight), msg=f"pass {number}")


def scaled(seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return 3 * gradient

    return hook


def test_hooks_of_a_weight_see_the_gradient_of_their_pass_alone() -> None:
    linear, plain = layer(), layer()
    seen: list[Tensor] = []
    for net in (linear, plain):
        net.weight.register_hook(scaled(seen))
        for number in range(2):
            with WeightGradients().applied():
                y = net(inputs(number)).sum() if net is linear else None
            (net(inputs(number)).sum() if y is None else y).backward()
    for own, other in zip(seen[:2], seen[2:], strict=True):
        torch.testing.assert_close(own, other)
    torch.testing.assert_close(grad(linear.weight), grad(plain.weight))


def test_only_trained_weights_are_written_to_and_only_where_it_was_asked_for() -> None:
    linear = layer()
    assert not is_by_hand(linear.weight)
    with WeightGradients().applied():
        assert is_by_hand(linear.weight)
        linear.weight.requires_grad_(False)
        assert not is_by_hand(linear.weight)
        x = inputs(0)
        linear(x).sum().backward()
    assert linear.weight.grad is None
    torch.testing.assert_close(grad(x), linear.weight.sum(0).expand_as(x))
