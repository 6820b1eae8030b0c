"""The state that a stage keeps between its actions on a micro-batch, and a count of the bytes that autograd saves."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from simplellm.autograd import backward
from simplellm.recomputation import Observer, Recomputed, observers
from simplellm.weight_gradients import DeferredWeightGradients, WeightGradients

Loss = Callable[[Tensor, Tensor], Tensor]


class SavedActivations:
    """Counts the bytes saved for later backward passes: each storage once, parameters not at all."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        # By the storage itself: the address changes of one that is freed and filled again (ShardedDP's).
        self._parameters = {p.untyped_storage()._cdata for p in parameters}
        self._kept, self._usually_kept = _Bytes(), _Bytes()

    @property
    def now_bytes(self) -> int:
        """Bytes kept now."""
        return self._kept.now

    @property
    def peak_bytes(self) -> int:
        """The most bytes kept at a time so far."""
        return self._kept.peak

    @property
    def usual_peak_bytes(self) -> int:
        """What `peak_bytes` would be without recomputation."""
        return self._usually_kept.peak

    def take_recent_peak(self) -> int:
        """The most bytes kept at a time since the last call."""
        recent, self._kept.recent_peak = self._kept.recent_peak, self._kept.now
        return recent

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, count what forward passes save, and what backward passes recompute or keep for weight gradients."""
        observers.append(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(_keep_and_count, lambda kept: kept[0]):
                yield
        finally:
            observers.remove(self)

    def keep(self, tensor: Tensor) -> object:
        """Count a tensor for as long as the returned object exists."""
        return self._count(tensor, self._kept, self._usually_kept)

    def keep_again(self, tensor: Tensor) -> object:
        return self._count(tensor, self._kept)

    def leave_out(self, tensor: Tensor) -> object:
        return self._count(tensor, self._usually_kept)

    def _count(self, tensor: Tensor, *counts: "_Bytes") -> object:
        storage = tensor.untyped_storage()
        return None if storage._cdata in self._parameters else [_Counted(storage, count) for count in counts]


def _keep_and_count(tensor: Tensor) -> tuple[Tensor, object]:
    return tensor.detach(), [observer.keep(tensor) for observer in observers]


class _Bytes:
    """The size of some storages together, now and at most so far."""

    def __init__(self) -> None:
        self.users: Counter[StorageWeakRef] = Counter()  # which keep its address from being used again
        self.now = self.peak = self.recent_peak = 0


class _Counted:
    """Has a storage counted for as long as it exists, be the storage in memory or not."""

    def __init__(self, storage: torch.UntypedStorage, count: _Bytes) -> None:
        self._storage, self._size, self._count = StorageWeakRef(storage), storage.nbytes(), count
        count.users[self._storage] += 1
        if count.users[self._storage] == 1:
            count.now += self._size
            count.peak, count.recent_peak = max(count.peak, count.now), max(count.recent_peak, count.now)

    def __del__(self) -> None:
        self._count.users[self._storage] -= 1
        if not self._count.users[self._storage]:
            del self._count.users[self._storage]
            self._count.now -= self._size


class Stage:
    """A stage's module, and what its actions keep of each micro-batch for later actions."""

    def __init__(self, net: nn.Module, loss: Loss | None, kept: SavedActivations | None) -> None:
        self.net, self._loss, self._kept = net, loss, kept
        self.micro_batches: Sequence[Tensor] = ()  # of this step: token ids, each (batch, seq)
        self.shares: Sequence[float] = ()  # of this step: each micro-batch's fraction of all targets
        self.losses: dict[int, Tensor] = {}  # on the last stage, by micro-batch: its share of the mean loss
        self.live: dict[int, tuple[Any, ...]] = {}  # by micro-batch: what is kept for later actions
        self.recomputed: dict[int, Recomputed] = {}  # by micro-batch: its forward pass, to be computed again
        self.deferred: dict[int, DeferredWeightGradients] = {}  # by micro-batch: weight gradients still to compute
        self._weight_gradients = WeightGradients()  # of micro-batches that are not deferred
        self._holds: dict[int, object] = {}  # by micro-batch: keeps the output in the count

    def defer(self, micro_batch: int) -> None:
        """Make a micro-batch's backward pass leave the weight gradients of linear layers in `deferred`."""
        self.deferred[micro_batch] = DeferredWeightGradients(self._count)

    def _count(self, tensor: Tensor) -> object:
        return [observer.keep(tensor) for observer in self._observers()]

    def _observers(self) -> list[Observer]:
        return [*observers, *([self._kept] if self._kept else [])]

    def forward(self, micro_batch: int, x: Tensor, keep_input_only: bool = False) -> Tensor:
        """The stage's output for `x`; on the last stage, the micro-batch's share of the loss.

        With `keep_input_only`, the rest that the backward pass needs is left to `recomputed`.
        """
        output: Callable[[Tensor], Tensor] = partial(self._output, micro_batch)
        if keep_input_only:
            output = self.recomputed[micro_batch] = Recomputed(output)
        with contextlib.ExitStack() as contexts:
            if self._kept is not None:
                contexts.enter_context(self._kept.counting())
            contexts.enter_context(self.deferred.get(micro_batch, self._weight_gradients).applied())
            y = output(x)
        if self._loss is not None:
            self.losses[micro_batch] = y.detach()
        if y.requires_grad:
            holds = [o.leave_out(y) if keep_input_only else o.keep(y) for o in self._observers()]
            self._holds[micro_batch] = holds
        return y

    def _output(self, micro_batch: int, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        if self._loss is not None:
            y = self._loss(y, self.micro_batches[micro_batch]) * self.shares[micro_batch]
        return y

    def rehearse(self, ids: Tensor, x: Tensor) -> None:
        """Run a forward and a backward pass that leave no trace: no gradients, and the random state is restored.

        Args:
            ids: token ids (batch, seq), the targets on the last stage.
            x: the stage's input.
        """
        with torch.random.fork_rng({p.device for p in self.net.parameters() if p.is_cuda}):
            y = self.net(x) if self._loss is None else self._loss(self.net(x), ids)
            inputs = [tensor for tensor in (x, *self.net.parameters()) if tensor.requires_grad]
            if inputs:  # not `backward`, which would trigger the hooks that collect gradients
                torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)

    def keep_graph(self, micro_batch: int, x: Tensor, y: Tensor) -> None:
        """Keep a micro-batch's input and the graph of its output, without the output itself."""
        self.live[micro_batch] = x, get_gradient_edge(y)

    def backward(self, micro_batch: int, *received: Tensor) -> Tensor:
        """Run a micro-batch's backward pass; returns the input, which now has its gradient.

        `received` is the gradient of the stage's output, from the next stage; the last stage has none.
        """
        x, y = self.release(micro_batch)
        if received:
            backward(y, *received)
        else:
            torch.autograd.backward([y])
        return cast(Tensor, x)

    def release(self, micro_batch: int) -> tuple[Any, ...]:
        """Remove and return what is kept for a micro-batch."""
        self._holds.pop(micro_batch, None)
        return self.live.pop(micro_batch)
