"""What goes through the compiler, and on which GPU."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from simplellm.compiled import applied
from simplellm.compiler import Compiler
from simplellm.llama import CausalLLama, LLama


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


def test_only_training_passes_are_compiled() -> None:
    model, ids = LLama(CausalLLama, 9, dmodel=8, num_heads=2, n_layers=1), torch.tensor([[1, 2]])
    compiled: list[object] = []

    def compiler(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        compiled.append(function)
        return function(*arguments)

    with applied(compiler):
        with torch.no_grad():
            model(ids)
        assert not compiled
        model(ids)
    assert compiled
