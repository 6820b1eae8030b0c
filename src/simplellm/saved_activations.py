"""A count of the bytes that autograd saves for backward passes, with and without recomputation."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

observers: list["SavedActivations"] = []  # those that count now


class SavedActivations:
    """Counts the bytes saved for later backward passes: each storage once, parameters not at all.

    An object that counts a tensor is held for as long as the tensor is, or would be, in memory.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        # By the storage itself: a storage that is freed and filled again (ShardedDP's) changes its address.
        self._parameters = {p.untyped_storage()._cdata for p in parameters}
        self._kept, self._usually_kept = _Bytes(), _Bytes()

    @property
    def now_bytes(self) -> int:
        """Bytes kept now."""
        return self._kept.now

    @property
    def peak_bytes(self) -> int:
        """The maximum of bytes kept so far."""
        return self._kept.peak

    @property
    def usual_peak_bytes(self) -> int:
        """The value that `peak_bytes` would have without recomputation."""
        return self._usually_kept.peak

    def take_recent_peak(self) -> int:
        """Return the maximum of bytes kept since the last call."""
        recent, self._kept.recent_peak = self._kept.recent_peak, self._kept.now
        return recent

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, count tensors that forward passes save, and that backward passes recompute or keep for weights."""
        observers.append(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(_keep_and_count, lambda kept: kept[0]):
                yield
        finally:
            observers.remove(self)

    def keep(self, tensor: Tensor) -> object:
        """Count a tensor that would also be kept without recomputation."""
        return self._count(tensor, self._kept, self._usually_kept)

    def keep_again(self, tensor: Tensor) -> object:
        """Count a tensor that is kept because of recomputation: an input, or a tensor that has been computed again."""
        return self._count(tensor, self._kept)

    def leave_out(self, tensor: Tensor) -> object:
        """Count a tensor that is not kept but would be without recomputation."""
        return self._count(tensor, self._usually_kept)

    def _count(self, tensor: Tensor, *counts: "_Bytes") -> object:
        storage = tensor.untyped_storage()
        return None if storage._cdata in self._parameters else [count.add(storage) for count in counts]


def _keep_and_count(tensor: Tensor) -> tuple[Tensor, object]:
    return tensor.detach(), [observer.keep(tensor) for observer in observers]


class _Bytes:
    """The total size of some storages, now and at its maximum so far."""

    def __init__(self) -> None:
        self._users: Counter[StorageWeakRef] = Counter()  # references that prevent the reuse of its address
        self._counted: dict[weakref.ref[_Kept], tuple[StorageWeakRef, int]] = {}
        self._ended: list[weakref.ref[_Kept]] = []
        self._now = self.peak = self.recent_peak = 0

    def add(self, storage: torch.UntypedStorage) -> object:
        """Count a storage for as long as the returned object exists, whether or not the storage is in memory."""
        kept, reference, size = _Kept(), StorageWeakRef(storage), storage.nbytes()
        # Not a `__del__`: Ctrl-C would be lost if it came while one runs.
        self._counted[weakref.ref(kept, self._ended.append)] = reference, size
        self._users[reference] += 1
        if self._users[reference] == 1:
            self._now = self.now + size
            self.peak, self.recent_peak = max(self.peak, self._now), max(self.recent_peak, self._now)
        return kept

    @property
    def now(self) -> int:
        while self._ended:
            reference, size = self._counted.pop(self._ended.pop())
            self._users[reference] -= 1
            if not self._users[reference]:
                del self._users[reference]
                self._now -= size
        return self._now


class _Kept:
    """Exists for as long as a storage is counted."""
