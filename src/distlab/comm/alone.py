"""The process group of a rank that is alone: what it would send to itself, torch copies."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.context import Context, ContextGroup, Options, first_context
from distlab.machine.torch_patches import group_of_one

if TYPE_CHECKING:
    from distlab.comm.waits import Wait


class GroupOfOne(ContextGroup):
    """A group of one rank; its operations end before their calls return, and count as nothing sent."""

    def __init__(self, context: Context) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.context, self.key = context, str(context.rank)
        library = group_of_one()
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, library)

    def held_back(self) -> "list[Wait]":
        return []

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Leave the tensors as they are. torch's group has no result for a future, which torch's DDP asks for."""
        return _Done(list(tensors))


class _Done(dist.Work):
    """An operation that is complete."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


def create(made: Any, options: Options | None) -> GroupOfOne:
    """Return the group that torch asks for: the default group, or a group of `new_group`, which shares its context."""
    world = dist.group.WORLD
    return GroupOfOne(world.context if isinstance(world, ContextGroup) else first_context(made, options))
