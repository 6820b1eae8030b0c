"""What the compiler does that no run on the CPU shows."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from simplellm.compiler import Compiler


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
