"""The process group of a rank that is alone: what it would send to itself, torch copies."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.context import Context, ContextGroup, Operation, Options, first_context, require_one_dtype
from distlab.machine.torch_patches import group_of_one


class GroupOfOne(ContextGroup):
    """A group of one rank; its operations end before their calls return, and count as nothing sent."""

    def __init__(self, context: Context) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.context = context
        library = group_of_one()
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, library)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Operation:  # type: ignore[override]
        """Leave the tensors as they are. torch's group has no result for a future, which torch's DDP asks for."""
        return Operation(list(tensors))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Operation:
        return _copied([output], [input])

    def all_gather_single_coalesced(
        self, output: Sequence[Tensor], input: Sequence[Tensor], opts: Any = None
    ) -> Operation:
        return _copied(output, input)

    def allgather(self, output: Sequence[Sequence[Tensor]], input: Sequence[Tensor], opts: Any = None) -> Operation:  # type: ignore[override]
        return _copied(output[0], input)

    def scatter(self, output: Sequence[Tensor], input: Sequence[Sequence[Tensor]], opts: Any = None) -> Operation:  # type: ignore[override]
        return _copied(output, input[0])

    def all_to_all_single(self, output: Tensor, input: Tensor, *sizes: Any) -> Operation:
        return _copied([output], [input])

    # With one rank, other operations do the same. torch 2.11, whose own group of one copies nothing, has other names.
    _single: Any = all_gather_single
    _several: Any = all_gather_single_coalesced
    reduce_scatter_single = _allgather_base = _reduce_scatter_base = _single
    reduce_scatter_single_coalesced = alltoall = _several
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = _several
    gather: Any = allgather
    allgather_coalesced: Any = allgather
    reduce_scatter: Any = scatter
    alltoall_base: Any = all_to_all_single

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> dist.Work:
        raise ValueError("a message to oneself: this group has one rank")

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> dist.Work:
        raise ValueError("a message from oneself: this group has one rank")


@torch.inference_mode()  # as in torch's own groups
def _copied(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Operation:
    """Copy tensors of equal sizes; one may be the other, as in a reduce-scatter in place."""
    for output, input in zip(outputs, inputs, strict=True):
        require_one_dtype([output, input])
        if output.data_ptr() != input.data_ptr():
            output.view_as(input).copy_(input)
    return Operation(list(outputs))


def create(made: Any, options: Options | None) -> GroupOfOne:
    """Return the group that torch asks for: the default group, or a group of `new_group`, which shares its context."""
    world = dist.group.WORLD
    return GroupOfOne(world.context if isinstance(world, ContextGroup) else first_context(made, options))
