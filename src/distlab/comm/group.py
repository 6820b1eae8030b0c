"""Functions of process groups beyond those of torch; on groups of other backends, they do the plain thing.

None stands for the group of all ranks.
"""

import contextlib
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.context import Group, context_if_any
from distlab.comm.lab_group import LabGroup
from distlab.comm.names import CONTROL, named

# torch 2.11 has these under other names only, which are deprecated in 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def empty(elements: int, like: Tensor, group: Group = None) -> Tensor:
    """Return zeros (elements,), of `like`'s dtype and device, for repeated communication.

    Where it pays, they are in memory that the ranks of the group share, and their collectives need no copy; all ranks
    must give a collective such tensors, or none. All ranks of the group must call this in the same order, and, for
    collectives that they will start in `overlapping`, inside of it.

    Raises:
        InputError: the transport is "shared", and these ranks cannot share memory.
        TrafficError: a rank does not take part.
    """
    memory = found.memory if (found := _lab_group(group)) else None
    shared = memory.empty(elements, like) if memory and elements else None
    return like.new_zeros(elements) if shared is None else shared


def shares(tensor: Tensor, group: Group = None) -> bool:
    """Return whether a tensor lies in memory that this group shares on one host, as a tensor of `empty` may."""
    found = _lab_group(group)
    return found is not None and found.memory is not None and found.memory.shares(tensor)


def open_queues(row: Sequence[int], message_bytes: int, like: Tensor, group: Group = None, *, slots: int = 1) -> None:
    """Send messages from each rank of a row to the next through memory that both share, where they can.

    Larger messages, and messages without a queue, go over gloo or NCCL. A `send` returns when its message is in one of
    the `slots`, and so waits for a free one. All ranks of the row call this together.

    Args:
        row: ranks of the world; one may be there several times.
        message_bytes: size of the largest message.
        like: a tensor on the messages' device.

    Raises:
        InputError: the transport is "shared", and these ranks cannot share memory.
        TrafficError: a rank does not take part.
    """
    found = _lab_group(group)
    for link in pairwise(row):
        is_link = link[0] != link[1]  # a worker may hold two stages, one after the other
        if found and found.queues and is_link and found.context.rank in link:
            found.queues.open(link, message_bytes, like, slots)


def close_queues(row: Sequence[int], group: Group = None) -> None:
    """Close the queues along a row; all their messages must have been received or be in a slot."""
    found = _lab_group(group)
    for link in pairwise(row):
        if found and found.queues:
            found.queues.close_queue(link)


def starting_together(group: Group = None) -> contextlib.AbstractContextManager[None]:
    """Return a context for sends and receives that all ranks of the group start together, as around a ring.

    The caller waits for them after it. Without it, NCCL would start one after another, and ranks that all send first
    would wait for each other.
    """
    found = _lab_group(group)
    return found.starting_together() if found else contextlib.nullcontext()


def connect_nccl(group: Group) -> None:
    """Over NCCL, connect the ranks now rather than in the first step.

    NCCL connects ranks in their first collective, which may have to wait until the GPU is idle. Within a step, the GPU
    may be busy with a receive that the sender serves only after this collective: a deadlock.
    """
    found = _lab_group(group)
    if found and found.context.is_over_nccl:
        with named("a first message", CONTROL):
            dist.all_reduce(torch.zeros(1, device=found.context.device), group=group)


def device_of() -> torch.device:
    """Return the device from which a tensor is sent without a copy: this rank's GPU over NCCL, else host memory."""
    context = context_if_any()
    if context is None:
        return torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    return context.device if context.is_over_nccl else torch.device("cpu")


def _lab_group(group: Group) -> LabGroup | None:
    found = dist.group.WORLD if group is None else group
    return found if isinstance(found, LabGroup) else None
