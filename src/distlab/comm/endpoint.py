"""The ranks of the process group, and endpoints, through which handwritten collectives send and receive."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: all ranks


class Endpoint(Protocol):
    """One rank's connection to all ranks. The module `torch.distributed` itself is an endpoint for its process group.

    `isend` and `irecv` return a handle with `wait()`. (torch's return None on ranks outside the process group.)
    """

    def get_rank(self) -> int: ...
    def get_world_size(self) -> int: ...
    def send(self, tensor: Tensor, dst: int, /) -> object: ...
    def recv(self, tensor: Tensor, src: int, /) -> object: ...
    def isend(self, tensor: Tensor, dst: int, /) -> Any: ...
    def irecv(self, tensor: Tensor, src: int, /) -> Any: ...
    def barrier(self) -> object: ...


class ProcessGroupEndpoint:
    """The default process group without the checks of `dist.isend` and `dist.irecv`, which slow down small messages."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.get_rank, self.get_world_size = group.rank, group.size
        self.send, self.recv, self.barrier = dist.send, dist.recv, dist.barrier

    def isend(self, tensor: Tensor, dst: int, /) -> dist.Work:
        return self._group.send([tensor], dst, 0)

    def irecv(self, tensor: Tensor, src: int, /) -> dist.Work:
        return self._group.recv([tensor], src, 0)


class CountingEndpoint:
    """Wraps an endpoint and counts the bytes that this rank sends through it."""

    def __init__(self, inner: Endpoint) -> None:
        self.sent_bytes = 0
        self._send, self._isend = inner.send, inner.isend
        self.recv, self.irecv = inner.recv, inner.irecv
        self.get_rank, self.get_world_size, self.barrier = inner.get_rank, inner.get_world_size, inner.barrier

    def send(self, tensor: Tensor, dst: int, /) -> None:
        self.sent_bytes += tensor.nbytes
        self._send(tensor, dst)

    def isend(self, tensor: Tensor, dst: int, /) -> Any:
        self.sent_bytes += tensor.nbytes
        return self._isend(tensor, dst)


def process_group() -> Endpoint:
    """The fastest endpoint for all ranks of the process group; `torch.distributed` if there is no process group."""
    return ProcessGroupEndpoint(dist.group.WORLD) if dist.group.WORLD is not None else dist


def is_over_nccl() -> bool:
    """Whether ranks communicate over NCCL: from GPU to GPU, in the order of CUDA streams."""
    return dist.is_initialized() and dist.get_backend() == "nccl"


def world_size() -> int:
    """Ranks in the process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def members(group: Group) -> Sequence[int]:
    """The ranks of `group`. With None: all ranks, or only rank 0 if there is no process group."""
    return range(world_size()) if group is None else dist.get_process_group_ranks(group)
