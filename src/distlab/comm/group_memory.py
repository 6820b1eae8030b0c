"""The memory that this rank shares with others: who may share it, and the tensors in it, by group."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.devices import cores
from distlab.comm.endpoint import Group, is_over_nccl, members, rank
from distlab.comm.hosts import Hosts, MemoryOfHosts
from distlab.comm.mappings import NotShared
from distlab.comm.shared import SharedMemory
from distlab.comm.waits import NamedWaits, Wait, group_key
from simplellm.errors import InputError

Transport = Literal["auto", "shared", "gloo"]
MOST_THAT_READ_ALL = 3  # ranks; if more of them each add up all terms, that takes longer than to wait a second time


class Term(NamedTuple):
    """A place in shared memory for a term of a sum over the ranks."""

    own: Tensor  # in its shape
    memory: SharedMemory
    parts: list[Tensor]  # every rank's, (elements,) each


class GroupMemory(NamedWaits):
    """Tensors in memory that the ranks of a group share, on one host or on several; waits for these have names."""

    def __init__(self) -> None:
        super().__init__()
        self.transport: Transport = "auto"  # for tensors in host memory, over gloo's process groups
        self.hosts: Hosts | None = None  # where the ranks are; None: all are taken to be on one host
        self.smallest_shared_bytes = 1_000  # of collectives, with "auto"; less is not worth a mapping
        self.smallest_of_hosts_bytes = 250_000  # the same for ranks on several hosts: gloo is as fast for less
        self.threads: int | None = None  # that a rank usually computes with; None: as many as it has now
        self.remark: Callable[[str], object] = lambda sentence: print(f"# {sentence}", flush=True)
        self.shares_memory = False  # whether this rank shares memory with other ranks
        # By group; kept to the end of the process, because a group that is collected may hang (see Run.close).
        self._shared: dict[dist.ProcessGroup, SharedMemory | MemoryOfHosts] = {}
        self._buffers: dict[tuple[str, Group, torch.dtype], Tensor] = {}  # by use, for tensors that change their place
        self._terms: dict[tuple[Group, torch.device, torch.dtype, int, tuple[int, ...]], Term] = {}  # by turn and shape
        self._sums: Counter[tuple[Group, torch.dtype]] = Counter()  # of terms, so far
        self._without_more: set[dist.ProcessGroup] = set()  # groups whose ranks get no more shared memory
        self._has_remarked = False  # that memory cannot be shared

    def new_buffer(self, elements: int, like: Tensor, group: Group = None, *, goes_on_alone: bool = False) -> Tensor:
        """Zeros (elements,), of `like`'s dtype and device, to be combined over a group's ranks again and again.

        They are in memory that these ranks share, where `transport` allows it and it pays; collectives then need no
        copy first, and no message but signals of a byte. Ranks on several hosts share it on each host, and use it for
        all-reduces only. All ranks of the group must call this in the same order. With `goes_on_alone`, an all-reduce
        has to go on while its ranks compute, so the memory of one host is not used.

        Raises:
            InputError: the transport is "shared", and these ranks cannot share memory.
            TrafficError: a rank does not take part.
        """
        ranks, plain = members(group), partial(like.new_zeros, elements)
        timeout = timedelta(seconds=self.timeout_seconds)
        key = group or dist.group.WORLD
        if key is None or key in self._without_more or not self._is_to_share(elements * like.itemsize, like, ranks):
            return plain()
        if goes_on_alone and self._are_on_one_host(ranks):
            return plain()
        try:
            with self.named(Wait("shared memory", "other", tuple(r for r in ranks if r != rank()))):
                memory = self._shared[key] if key in self._shared else self._memory_of(key, ranks, timeout)
                self._shared[key] = memory
                buffer = memory.allocate(elements, like.dtype, timeout)
                self.shares_memory = True
                return buffer
        except NotShared as error:
            self._share_less(error, is_first=memory.rank == 0)
            self._without_more.add(key)  # what has been allocated stays shared
            return plain()

    def _memory_of(
        self, group: dist.ProcessGroup, ranks: Sequence[int], timeout: timedelta
    ) -> SharedMemory | MemoryOfHosts:
        if self.hosts is None or self._are_on_one_host(ranks):
            return SharedMemory(group, self._has_own_core())
        same = [memory for memory in self._shared.values() if getattr(memory, "ranks", None) == tuple(ranks)]
        return MemoryOfHosts(self.hosts, ranks, rank(), f"{group_key(ranks)}/{len(same)}", timeout)

    def _has_own_core(self) -> bool:
        """Whether this host has a core for each thread of its ranks, which all have as many."""
        here = dist.get_world_size() if self.hosts is None else self.hosts.of_ranks.count(self.hosts.of_ranks[rank()])
        return here * (self.threads or torch.get_num_threads()) <= cores()

    def scratch(self, shape: Sequence[int], like: Tensor, group: Group = None) -> Tensor:
        """A tensor of this shape, of `like`'s dtype and device, for an all-gather or a reduce-scatter; not initialized.

        It is in shared memory, if the ranks of the group are on one host and have it, and the next call uses it again:
        the collective must have ended by then, and the result been copied. All ranks of the group call this with shapes
        of one size.
        """
        kept = self._kept_buffer("scratch", shape, like, group) if self._are_on_one_host(members(group)) else None
        return like.new_empty(shape) if kept is None else kept

    def next_term(self, shape: Sequence[int], like: Tensor, group: Group = None) -> Tensor | None:
        """Where the next `Traffic.all_reduced` of the group takes a tensor of this shape from; None if it has no place.

        What is written there needs no copy. Two places are used in turn, as other ranks may still read the last one.
        """
        term = self._next_term(shape, like, group)
        return None if term is None else term.own.detach()  # a tensor that autograd has not seen

    def _next_term(self, shape: Sequence[int], like: Tensor, group: Group) -> Term | None:
        turn = self._sums[group, like.dtype] % 2
        key = group, like.device, like.dtype, turn, tuple(shape)
        if key not in self._terms:
            ranks = members(group)
            has_places = len(ranks) <= MOST_THAT_READ_ALL and self._are_on_one_host(ranks)
            kept = self._kept_buffer(f"term {turn}", shape, like, group) if has_places else None
            shared = None if kept is None else self._shared_parts(kept, group)
            if kept is None or shared is None:
                return None
            self._terms[key] = Term(kept, *shared)
        return self._terms[key]

    def is_shared(self, tensor: Tensor, group: Group = None) -> bool:
        """Whether a tensor lies in memory that all of a group's ranks share, as what `new_buffer` returns may."""
        return self._shared_parts(tensor, group) is not None

    def _kept_buffer(self, use: str, shape: Sequence[int], like: Tensor, group: Group) -> Tensor | None:
        """A part, with this shape, of the group's buffer in shared memory for a use; None if it has or needs none."""
        elements = math.prod(shape)
        if not self._is_to_share(elements * like.itemsize, like, members(group)):
            return None
        key = use, group, like.dtype
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < elements:
            buffer = self._buffers[key] = self.new_buffer(elements, like, group)
            self._terms.clear()  # some are in the buffer before
        is_shared = self._parts_here(buffer, group)[1] is not None
        return buffer[:elements].view(torch.Size(shape)) if is_shared else None

    def _share_less(self, error: NotShared, is_first: bool) -> None:
        """Raise `InputError` if the transport is "shared"; else go on over gloo, with a remark of the first rank's."""
        if self.transport == "shared":
            raise InputError(f"--transport shared: {error}; use --transport gloo") from None
        if is_first and not self._has_remarked:
            self._has_remarked = True
            self.remark(f"{error}; what these ranks cannot share goes over gloo instead")

    def _are_on_one_host(self, ranks: Sequence[int]) -> bool:
        return self.hosts is None or len(self.hosts.split(ranks)) == 1

    def _may_share(self, like: Tensor, ranks: Sequence[int]) -> bool:
        """Whether these ranks may share memory for a tensor like this one; the same on all of them."""
        return self.transport != "gloo" and like.is_cpu and not is_over_nccl() and len(ranks) > 1

    def _is_to_share(self, size_bytes: int, like: Tensor, ranks: Sequence[int]) -> bool:
        """Whether they are to share it for collectives of so many bytes."""
        if self.hosts is not None and len(ranks) == len(self.hosts.split(ranks)):  # each is on a host of its own
            return False
        least = self.smallest_shared_bytes if self._are_on_one_host(ranks) else self.smallest_of_hosts_bytes
        return self._may_share(like, ranks) and (self.transport == "shared" or size_bytes >= least)

    def _shared_parts(self, tensor: Tensor, group: Group) -> tuple[SharedMemory, list[Tensor]] | None:
        """Where each rank of the group has its part of what lies in memory that all of them share."""
        memory, parts = self._parts_here(tensor, group)
        return (memory, parts) if isinstance(memory, SharedMemory) and parts is not None else None

    def _parts_here(
        self, tensor: Tensor, group: Group
    ) -> tuple[SharedMemory | MemoryOfHosts | None, list[Tensor] | None]:
        """Where each rank of the group that is on this host has its part of what lies in shared memory."""
        key = group or dist.group.WORLD
        memory = self._shared.get(key) if key is not None else None
        return memory, None if memory is None else memory.parts_like(tensor)
