"""Counts the bytes that autograd keeps between a forward and its backward pass."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor


class SavedActivations:
    """Counts what is saved for later backward passes: each storage once, parameters not."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._not_counted = {p.untyped_storage().data_ptr() for p in parameters}
        self._users: Counter[int] = Counter()
        self.now_bytes = self.peak_bytes = 0  # kept at the moment, and at most so far

    def counting(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which what forward passes save is counted."""
        return torch.autograd.graph.saved_tensors_hooks(self.keep, lambda kept: kept.tensor)

    def keep(self, tensor: Tensor) -> "_Kept":
        """Count a tensor that is kept by hand, for as long as the returned object lives."""
        return _Kept(self, tensor)

    def _add(self, storage: torch.UntypedStorage, users: int) -> None:
        address = storage.data_ptr()
        if address in self._not_counted or storage.nbytes() == 0:
            return
        was_kept = self._users[address] > 0
        self._users[address] += users
        self.now_bytes += storage.nbytes() * ((self._users[address] > 0) - was_kept)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


class _Kept:
    """A saved tensor, counted until it is dropped."""

    def __init__(self, counter: SavedActivations, tensor: Tensor) -> None:
        self._counter, self.tensor = counter, tensor.detach()
        counter._add(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self._counter._add(self.tensor.untyped_storage(), -1)
