"""Where a model's parts go through a compiler, if one is applied (`simplellm.compiler`)."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from simplellm.weight_gradients import current

# A function, and its arguments: modules, tensors, constants.
PartToCompile = tuple[Callable[..., Tensor], tuple[Any, ...]]


_compiler: Callable[..., Tensor] | None = None


@contextlib.contextmanager
def applied(compiler: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, parts go through a compiler: (function, *arguments) -> its result."""
    global _compiler
    outer, _compiler = _compiler, compiler
    try:
        yield
    finally:
        _compiler = outer


def through_compiler(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return `function(*arguments)`, through the compiler that is applied, if any.

    Only training passes are compiled. Weight gradients that are deferred need the layers' backward pass by hand.
    """
    if torch.compiler.is_compiling() or _compiler is None or not torch.is_grad_enabled():
        return function(*arguments)
    if current() is not None and any(isinstance(argument, nn.Module) for argument in arguments):
        return function(*arguments)
    return _compiler(function, *arguments)
