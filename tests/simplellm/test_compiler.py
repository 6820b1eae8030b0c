"""What goes through the compiler, and on which GPU."""

import threading
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from support.small_models import enliven
from torch import Tensor, nn

from simplellm.compiled import applied
from simplellm.compiler import Compiler, can_compile, key_of, parts_of_model
from simplellm.errors import InputError
from simplellm.layers import MLP
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss


def test_it_compiles_on_the_gpu_of_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread starts with the first GPU as its current one, whichever its rank has."""
    of_thread, found = threading.local(), list[int]()

    def current() -> int:
        gpu: int = getattr(of_thread, "gpu", 0)
        return gpu

    def noting(function: Callable[[Tensor], Tensor], **_: object) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            found.append(current())
            return function(x)

        return call

    def double(x: Tensor) -> Tensor:
        return x * 2

    monkeypatch.setattr("torch.compile", noting)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", current)
    monkeypatch.setattr("torch.cuda.set_device", lambda gpu: setattr(of_thread, "gpu", gpu))
    torch.cuda.set_device(1)
    Compiler().prepare(double, torch.zeros(3, requires_grad=True))
    assert found == [1]


def test_a_part_that_is_compiled_during_a_step_is_told_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    told = list[str]()
    compiler = Compiler(told.append)
    for size, count in ((3, 1), (4, 2), (3, 2)):
        x = torch.ones(size, requires_grad=True)
        assert torch.equal(compiler(double, x), 2 * x)
        assert len(told) == count
    assert {*told} == {"compiling double during this step"}
    assert key_of(double, (x,)) != key_of(double, (x.detach(),)), "without gradients, it is another program"


def test_preparation_leaves_gradients_alone_and_needs_none_for_a_bias_that_is_added_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    mlp = MLP(4, 6, bias=True)
    mlp.down_proj.adds_bias = False  # as in slices, whose results are added up first
    gradients = list[Tensor]()
    mlp.up_proj.weight.register_hook(gradients.append)
    Compiler().prepare(MLP.compute, mlp, torch.ones(1, 2, 4, requires_grad=True))
    assert all(parameter.grad is None for parameter in mlp.parameters())
    assert len(gradients) == 1, "the backward pass is compiled too"


@pytest.mark.parametrize("options", [{}, {"document_end": 1}, {"recompute": "except-attention"}, {"experts": 2}])
def test_what_a_training_pass_compiles_is_prepared_before_the_first(options: dict[str, Any]) -> None:
    """And passes without gradients compile nothing."""
    model = LLama(CausalLLama, 9, dmodel=8, num_heads=2, n_layers=1, **options)
    ids, compiled = torch.tensor([[1, 2, 3]]), set[Hashable]()

    def compiler(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        compiled.add(key_of(function, arguments))
        with applied(lambda part, *its_arguments: part(*its_arguments)):  # as a part of a program is no program
            return function(*arguments)

    with applied(compiler):
        with torch.no_grad():
            model(ids)
        assert not compiled
        model(ids)
    assert compiled == {key_of(*part) for part in parts_of_model(model, *ids.shape)}
    compiled.clear()
    with pytest.raises(InputError, match="999 tokens are too many"), applied(compiler):
        model(torch.zeros(1, 999, dtype=torch.int64))
    model(ids)
    assert not compiled, "after the error"


def test_the_plain_form_that_layers_have_inside_of_a_program_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"dmodel": 8, "num_heads": 2, "n_layers": 2, "ctx_size": 6}
    model = LLama(CausalLLama, 9, **sizes, attention_bias=True, mlp_bias=True, qk_norm=True)
    enliven(model)
    ids, results = torch.arange(18).view(3, 6) % 9, []
    for is_compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda answer=is_compiling: answer)
        loss = causalLLMLoss(model(ids), ids, 9)
        results.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    torch.testing.assert_close(*results)


def test_a_part_that_calls_hooks_is_not_compiled() -> None:
    """As those of collectives; the hooks of the module whose method it is are called outside of the part."""
    for register in (nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook):
        mlp = MLP(4, 6)
        register(mlp, lambda *_: None)
        assert can_compile(MLP.compute, mlp)
        register(mlp.up_proj, lambda *_: None)
        assert not can_compile(MLP.compute, mlp)
    (mlp := MLP(4, 6)).up_proj.weight.register_hook(lambda gradient: gradient)
    assert not can_compile(MLP.compute, mlp)
