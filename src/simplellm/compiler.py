"""Parts of a model that `torch.compile` translates to one program for each shape of their inputs.

The compiler fuses everything between two matrix products, such as a norm or the SiLU of a feed-forward layer, so that
each intermediate result passes through memory once (Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic
Python Bytecode Transformation and Graph Compilation", ASPLOS 2024). It derives the backward pass, so inside a compiled
part the layers have their plain form instead of the one by hand.
"""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from simplellm.blocks import Attention, Block, logits
from simplellm.compiled import PartToCompile, applied
from simplellm.layers import MLP, RMSNorm, rotary_tables
from simplellm.llama import LLamaPart


class Compiler:
    """Compiles the parts of models that are called inside `applied`, in training only.

    Modules with equal sizes, such as the blocks of a model, share a program.

    Args:
        tell: called with the name of a part that is compiled because no `prepare` has foreseen its inputs.
    """

    def __init__(self, tell: Callable[[str], object] = lambda _: None) -> None:
        self._tell = tell
        self._functions: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
        self._known: set[Hashable] = set()
        keep_device_guard()

    def applied(self) -> AbstractContextManager[None]:
        """Inside, compile what is called through `through_compiler`."""
        return applied(self)

    def __call__(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Return `function(*arguments)`, compiled if all of its modules can be."""
        if not can_compile(function, *arguments):
            return function(*arguments)
        if key_of(function, arguments) not in self._known:
            self._tell(f"compiling {name_of(function)} during this step")
            self.prepare(function, *arguments)
        return self._functions[function](*arguments)

    def prepare(self, function: Callable[..., Tensor], *arguments: Any) -> None:
        """Compile the forward and the backward pass of a function for arguments like these, unless it has been done.

        It runs on zeros, in a thread that has neither hooks on saved tensors nor a grad mode of the caller.
        """
        if (key := key_of(function, arguments)) in self._known:
            return
        keep_distutils()
        if function not in self._functions:
            self._functions[function] = torch.compile(function, fullgraph=True, dynamic=False, options=_options())
        _in_thread(lambda: _rehearse(self._functions[function], arguments))
        self._known.add(key)


def keep_distutils() -> None:
    """Keep Python's distutils: setuptools, which torch's compiler imports, ends if it cannot replace it.

    Newer versions of setuptools warn of this, and the user can do nothing about it.
    """
    if sys.version_info < (3, 12):
        warnings.filterwarnings("ignore", "Reliance on distutils from stdlib", UserWarning)
        os.environ.setdefault("SETUPTOOLS_USE_DISTUTILS", "stdlib")


def keep_device_guard() -> None:
    """Let this thread, which outlives those that compile, make torch's stand-in for a GPU that is not there.

    In torch 2.11 built with CUDA, it ends with the thread that has made it, and crashes the next one that compiles.
    """
    torch._C._ensureCUDADeviceGuardSet()


def can_compile(function: Callable[..., Tensor], *arguments: Any) -> bool:
    """Return whether a function calls modules that have no hooks, such as collectives, and whose weights have none."""
    modules = [argument for argument in arguments if isinstance(argument, nn.Module)]
    # The hooks of a method's own module are outside of the method.
    own = [module for module in modules if getattr(type(module), function.__name__, None) is function]
    called = (module for outer in modules for module in outer.modules() if module not in own)
    has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in called)
    return not has_hooks and not any(p._backward_hooks for module in modules for p in module.parameters())


def parts_of_model(model: LLamaPart, batch: int, seq: int, is_whole: bool = True) -> list[PartToCompile]:
    """Return the parts that a forward pass in training on activations (batch, seq, dmodel) compiles.

    `is_whole` says whether these are whole sequences, whose attention is compiled. Parts with sizes that depend on the
    tokens, such as experts, are not among them.
    """
    device, found = next(model.parameters()).device, list[PartToCompile]()
    shape = batch, seq, model.options["dmodel"]
    x = torch.empty(shape, dtype=model.residual, device=device, requires_grad=True)
    tables = rotary_tables(model.ctx_size, model.head_dim, model.rope_theta, device, model.rope_scaling)
    cos, sin = (table[:seq] for table in tables)
    sees_all = is_whole and model.document_end is None and model.recompute != "except-attention"
    for block in list(model.model.layers.values())[:1]:
        attention, mlp = getattr(block, "self_attn", None), getattr(block, "mlp", None)
        is_usual = isinstance(block, Block) and isinstance(mlp, MLP) and sees_all
        if is_usual and can_compile(Block.compute, block):
            found.append((Block.compute, (block, x, cos, sin)))
            continue
        norm = next(module for module in block.modules() if isinstance(module, RMSNorm))
        found.append((RMSNorm.compute, (norm, x)))
        h = x.detach().to(norm.dtype).requires_grad_()
        if isinstance(attention, Attention) and sees_all:
            found.append((Attention.compute, (attention, h, cos, sin)))
        if isinstance(mlp, MLP):
            found.append((MLP.compute, (mlp, h)))
    if model.has_head:
        head = logits, (model.model.norm, model.lm_head, x)
        found.append(head if can_compile(logits, *head[1]) else (RMSNorm.compute, (model.model.norm, x)))
    return [(function, arguments) for function, arguments in found if can_compile(function, *arguments)]


def name_of(function: Callable[..., Tensor]) -> str:
    """Return the name of a part for people, such as "a block"."""
    return (function.__doc__ or function.__name__).partition(".")[0].partition(",")[0].lower()


def _options() -> dict[str, Any]:
    """Return options of `torch.compile`: the number of threads may change between calls, as idle cores are used."""
    return {
        "cpp.dynamic_threads": True,
        "guard_filter_fn": lambda guards: [guard.guard_type != "GLOBAL_STATE" for guard in guards],
    }


def key_of(function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Hashable:
    """Return a value that is the same for calls that share a program, as is its text on all ranks."""
    return function.__qualname__, *map(_key_of_argument, arguments)


def _key_of_argument(argument: Any) -> Hashable:
    if isinstance(argument, nn.Module):
        return tuple(_key_of_argument(parameter) for parameter in argument.parameters())
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device, argument.requires_grad
    return argument


def _rehearse(function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> None:
    zeros = [
        torch.zeros_like(argument).requires_grad_(argument.requires_grad) if isinstance(argument, Tensor) else argument
        for argument in arguments
    ]
    y = function(*zeros)
    weights = [p for argument in arguments if isinstance(argument, nn.Module) for p in argument.parameters()]
    inputs = [x for x in (*zeros, *weights) if isinstance(x, Tensor) and x.requires_grad]
    torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)  # leaves the weights' `grad` alone


def _in_thread(work: Callable[[], None]) -> None:
    """Run a function in a new thread, whose settings of autograd are the usual ones; raise its exception."""
    done: Future[None] = Future()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if gpu is not None:  # a new thread begins with the first GPU
                torch.cuda.set_device(gpu)
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done.result()
