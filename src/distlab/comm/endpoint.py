"""The ranks of the process group, and endpoints, through which handwritten collectives send and receive."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from distlab.comm.context import context_of

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


def is_over_nccl() -> bool:
    """Whether ranks communicate over NCCL: from GPU to GPU, in the order of CUDA streams."""
    return dist.is_initialized() and context_of().is_over_nccl


def world_size() -> int:
    """Ranks in the process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def members(group: Group) -> Sequence[int]:
    """The ranks of `group`. With None: all ranks, or only rank 0 if there is no process group."""
    return range(world_size()) if group is None else dist.get_process_group_ranks(group)
