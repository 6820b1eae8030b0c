"""Functions of process groups beyond those of torch; on groups of other backends, they do the plain thing.

None stands for the group of all ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.context import ContextGroup, Group
from distlab.comm.lab_group import LabGroup

# torch 2.11 has these under other names only, which are deprecated in 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def empty(elements: int, like: Tensor, group: Group = None, *, overlaps: bool = False) -> Tensor:
    """Return zeros (elements,) for repeated communication: `LabGroup.empty`, or plain memory in another backend."""
    found = _lab_group(group)
    return like.new_zeros(elements) if found is None else found.empty(elements, like, overlaps=overlaps)


def connect(group: Group) -> None:
    """Connect the ranks now: `LabGroup.connect`; other backends need nothing."""
    found = _lab_group(group)
    if found is not None:
        found.connect()


def shares(tensor: Tensor, group: Group = None) -> bool:
    """Return whether a tensor lies in memory that the ranks of a group share."""
    found = _lab_group(group)
    return found is not None and found.shares(tensor)


def received_bytes(parts: Tensor, group: Group = None) -> int:
    """Return the bytes of memory that a reduce-scatter of `parts` needs until it ends."""
    found = _lab_group(group)
    return 0 if found is None else found.received_bytes(parts)


def open_queues(row: Sequence[int], message_bytes: int, like: Tensor, group: Group = None, *, slots: int = 1) -> None:
    """Open queues along a row: `LabGroup.open_queues`; does nothing in another backend."""
    found = _lab_group(group)
    if found is not None:
        found.open_queues(row, message_bytes, like, slots=slots)


def device_of(group: Group = None) -> torch.device:
    """Return the device from which a tensor is sent without a copy: this rank's GPU over NCCL, else host memory."""
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, ContextGroup):
        return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    return found.context.device if found.context.is_over_nccl else torch.device("cpu")


def close_queues(row: Sequence[int], group: Group = None) -> None:
    """Close the queues along a row: `LabGroup.close_queues`."""
    found = _lab_group(group)
    if found is not None:
        found.close_queues(row)


def has_queue(sender: int, receiver: int, group: Group = None) -> bool:
    """Return whether this rank has an end of an open queue from one rank of the world to another."""
    found = _lab_group(group)
    return found is not None and found.has_queue(sender, receiver)


def _lab_group(group: Group) -> LabGroup | None:
    found = dist.group.WORLD if group is None else group
    return found if isinstance(found, LabGroup) else None
