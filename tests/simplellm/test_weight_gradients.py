"""Weight gradients that are computed later than in the backward pass, against those that autograd computes in it."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from simplellm.layers import Linear
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.weight_gradients import DeferredWeightGradients

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


def test_after_an_error_layers_compute_weight_gradients_at_once_again() -> None:
    linear, later = layer(), DeferredWeightGradients()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), later.applied():
        linear(torch.ones(1, 4))
    linear(inputs(0)).sum().backward()
    assert grad(linear.weight).abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_are_added_up_to_the_gradients_of_autograd(dtype: torch.dtype) -> None:
    options = {"dmodel": 12, "num_heads": 2, "n_layers": 2, "ctx_size": 6, "dtype": dtype}
    deferring, plain = (LLama(CausalLLama, VOCAB, **options) for _ in range(2))
    flat = torch.zeros(sum(p.numel() for p in deferring.parameters()))
    sizes = [p.numel() for p in deferring.parameters()]
    for parameter, part in zip(deferring.parameters(), flat.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter)
    for ids in IDS.split(1):
        later = DeferredWeightGradients()
        with later.applied():
            loss = causalLLMLoss(deferring(ids), ids, VOCAB)
        before = grad(deferring.get_parameter("lm_head.weight")).clone()
        loss.backward()
        assert torch.equal(grad(deferring.get_parameter("lm_head.weight")), before), "not yet"
        later.compute()
        causalLLMLoss(plain(ids), ids, VOCAB).backward()
    for (name, own), other, part in zip(
        deferring.named_parameters(), plain.parameters(), flat.split(sizes), strict=True
    ):
        assert grad(own).data_ptr() == part.data_ptr(), f"{name}: added up in place"
        assert grad(other).abs().max() > 1e-4, name
        torch.testing.assert_close(own.grad, other.grad, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_weight_that_is_used_twice_in_a_pass_gets_the_sum_of_both(is_deferred: bool) -> None:
    linear, plain = layer(), layer()
    for number in range(3):
        if number == 2:  # zeros, to which the next gradient is added
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


def test_inputs_of_one_dimension() -> None:
    linear, plain, x, later = layer(), layer(), torch.ones(5, requires_grad=True), DeferredWeightGradients()
    with later.applied():
        y = linear(x).square().sum()
    y.backward()
    later.compute()
    plain(x).square().sum().backward()
    torch.testing.assert_close(grad(linear.weight), grad(plain.weight))


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
            later = DeferredWeightGradients()
            with later.applied() if net is linear else contextlib.nullcontext():
                y = net(inputs(number)).sum()
            y.backward()
            later.compute()
    assert len(seen) == 4
    for own, other in zip(seen[:2], seen[2:], strict=True):
        torch.testing.assert_close(own, other)
    torch.testing.assert_close(grad(linear.weight), grad(plain.weight))


def test_only_the_gradients_of_trained_weights_are_deferred() -> None:
    linear, later, x = layer(), DeferredWeightGradients(), inputs(0)
    linear.weight.requires_grad_(False)
    with later.applied():
        y = linear(x).sum()
    y.backward()
    later.compute()
    assert linear.weight.grad is None
    torch.testing.assert_close(grad(x), linear.weight.sum(0).expand_as(x))
    x, (trained, plain), base = inputs(1).detach(), (layer(), layer()), torch.ones(4, 5, requires_grad=True)
    plain(x).sum().backward()
    with later.applied():
        y = trained(x).sum()
        of_base = functional_call(layer(), {"weight": 2 * base}, inputs(1)).sum()
    y.backward()
    torch.testing.assert_close(grad(trained.weight), grad(plain.weight), msg="at once, for a first layer")
    of_base.backward()
    torch.testing.assert_close(grad(base), 2 * grad(plain.weight), msg="at once, of what a weight is made of")
