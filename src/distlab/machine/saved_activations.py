"""A count of the bytes that autograd saves for backward passes."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from simplellm.autograd import observers


class SavedActivations:
    """Counts the bytes saved for later backward passes: each storage once, parameters not at all."""

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
    """The total size of some storages, now and at its maximum so far."""

    def __init__(self) -> None:
        self.users: Counter[StorageWeakRef] = Counter()  # references that prevent the reuse of its address
        self.now = self.peak = self.recent_peak = 0


class _Counted:
    """Counts a storage for as long as this object exists, whether or not the storage is in memory."""

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
