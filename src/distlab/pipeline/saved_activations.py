"""A count of the bytes that autograd saves for backward passes."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from simplellm.recomputation import observers


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
