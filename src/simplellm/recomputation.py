"""Activations that the backward pass computes again, instead of keeping them from the forward pass.

This saves memory, and costs up to a second forward pass (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
arXiv 1604.06174).
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from simplellm.saved_activations import observers
from simplellm.weight_gradients import current

_outermost: "Recomputed | None" = None  # the call with recomputed activations that is running


def once(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `function(*inputs)`; in the second run of a `Recomputed` call, the result of the first run.

    The tensors that it saves for its backward pass are kept from the first run too, except for its inputs. For a
    function whose result takes less memory than time, such as attention, and for a choice that depends on the last
    digit, such as the experts of a token: a second run on another number of threads could choose differently.
    """
    return function(*inputs) if _outermost is None else _outermost.once(function, *inputs)


class _CompleteError(Exception):
    """Raised to stop a second run, when everything that the backward pass needs has been computed again."""


class Recomputed:
    """One call of a function that keeps only its inputs.

    Autograd hands over each tensor that the backward pass will need, and gets a number instead. When the backward pass
    asks for the first tensor, the function runs again. The tensors that autograd hands over in this second run, in the
    same order, are kept until the backward pass asks for them. The second run stops after the last of them, because the
    rest, such as the last product of a transformer block, is needed only for the output; its graph is dropped. The
    gradients pass through the graph of the first run, so their values, their order and all hooks are the same as
    without recomputation.

    Args:
        function: takes tensors and returns a tensor. In the second run it draws the same random numbers as in the
            first, for example in dropout, from torch's generators of the CPU and of the inputs' GPUs; otherwise, it
            must be deterministic.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._count = 0  # number of tensors that autograd has handed over
        self._again: dict[int, tuple[Tensor, object]] = {}  # recomputed, by number; with the observers' objects

    def __call__(self, *inputs: Tensor) -> Tensor:
        if _outermost is not None or not torch.is_grad_enabled():
            return self._function(*inputs)
        self._inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        self._gpus = {x.device for x in inputs if x.is_cuda}
        self._random_states = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in self._gpus]
        self._observers, self._weight_gradients = list(observers), current()
        self._observed = [observer.keep_again(x) for x in inputs for observer in self._observers]
        self._calls: list[_CallOnce] = []
        # In the second run: keeps a tensor, and the calls that it has yet to meet.
        self._again_with: tuple[Callable[[Tensor], None], Iterator[_CallOnce]] | None = None
        with saved_tensors_hooks(self._number, self._take), _inside(self):
            return self._function(*inputs)

    def compute(self) -> None:
        """Compute again the tensors for the backward pass, which calls this method unless it has been called before."""
        numbers = itertools.count()

        def keep(tensor: Tensor) -> None:
            number = next(numbers)
            self._again[number] = tensor.detach(), [observer.keep_again(tensor) for observer in self._observers]
            if number == self._count - 1:
                raise _CompleteError

        with contextlib.ExitStack() as contexts:
            contexts.enter_context(torch.random.fork_rng(self._gpus))
            of_cpu, of_gpus = self._random_states
            torch.set_rng_state(of_cpu)
            for gpu, state in zip(self._gpus, of_gpus, strict=True):
                torch.cuda.set_rng_state(state, gpu)
            contexts.enter_context(torch.enable_grad())
            contexts.enter_context(saved_tensors_hooks(keep, self._take))
            contexts.enter_context(_inside(self))
            self._again_with = keep, iter(self._calls)
            contexts.callback(setattr, self, "_again_with", None)
            if self._weight_gradients is not None:  # under which layers save different tensors
                contexts.enter_context(self._weight_gradients.applied())
            # In here: in Python 3.10, an exception that leaves a generator's context becomes part of a reference cycle,
            # and the cycle keeps the tensors of all its frames.
            with contextlib.suppress(_CompleteError):
                self._function(*self._inputs)

    def once(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `function(*inputs)`; in the second run, the result of the first run."""
        if self._again_with is not None:
            keep, calls = self._again_with
            call = next(calls)
            for index in call.saved_inputs:
                keep(inputs[index])
            return call.result.detach().requires_grad_(call.requires_grad)
        places, saved = [_place(x) for x in inputs], list[int]()

        def number(tensor: Tensor) -> tuple[int | Tensor, object]:
            if (place := _place(tensor)) in places:
                saved.append(places.index(place))
                return self._number(tensor)
            return tensor.detach(), [observer.keep(tensor) for observer in self._observers]

        with saved_tensors_hooks(number, self._take):
            result = function(*inputs)
        self._observed += [observer.keep_again(result) for observer in self._observers]
        self._calls.append(_CallOnce(saved, result.detach(), result.requires_grad))
        return result

    def _number(self, tensor: Tensor) -> tuple[int, object]:
        self._count += 1
        return self._count - 1, [observer.leave_out(tensor) for observer in self._observers]

    def _take(self, numbered: tuple[int | Tensor, object]) -> Tensor:
        number = numbered[0]
        if isinstance(number, Tensor):
            return number
        if number not in self._again:
            self.compute()
        return self._again.pop(number)[0]


class _CallOnce(NamedTuple):
    """A call that the second run leaves out."""

    saved_inputs: list[int]  # their indices, in the order in which autograd has handed them over
    result: Tensor
    requires_grad: bool


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@contextlib.contextmanager
def _inside(call: Recomputed) -> Iterator[None]:
    """Inside, nested calls run as without recomputation, because the outer call is recomputed as a whole."""
    global _outermost
    outer, _outermost = _outermost, call
    try:
        yield
    finally:
        _outermost = outer
