"""Memory that the ranks of a group share, in which each of them has a part, and the collectives on it.

The data never leaves memory. The signals "my part is there" and "my share is done" are bytes in pipes, so a wait ends
as any other does: with the signal, at the deadline, or when the other rank dies.
"""

import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.mappings import Mapping, Offer, accept, no_offer, not_shared
from distlab.comm.signals import Channel, Signal, close_all
from distlab.comm.waits import Wait

CHUNK_BYTES = 256 * 1024  # added up at a time, so that a chunk is written back to all parts while it is in the caches
READY, DONE = 1, 2  # signals
# Tensor-parallel ranks wait for each other every few milliseconds. Waking a thread up takes a tenth of one, and a core
# that has been idle is slow at first.
SPIN_SECONDS = 5e-4
COMBINE: dict[ReduceOp.RedOpType, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}


class SharedMemory:
    """What the ranks of a process group share: mappings, and the collectives on them, which run in their order.

    Args:
        group: its ranks are on one host, or `allocate` raises.
        has_own_core: whether no other rank needs the core of one that waits, so that it may spin.
    """

    def __init__(self, group: dist.ProcessGroup, has_own_core: bool) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.begun = 0  # collectives; each rank sends READY once for each
        self.divided = 0  # of these, those of which each rank does a share, and sends DONE
        self.asked_for = 0  # of these: this rank has done its share up to here, or is about to
        self.not_combined: deque[SharedCollective] = deque()  # this rank's part is there, its share is not done
        self._mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()  # one goes with the last tensor in it
        self._channels: list[Channel] = []  # to other ranks, by which they signal; made with the first mapping
        passes_on = self.rank == 0 and self.size > 2
        spin_seconds = SPIN_SECONDS if has_own_core else 0.0
        self.ready, self.done = (Signal(signal, self._channels, passes_on, spin_seconds) for signal in (READY, DONE))

    def allocate(self, elements: int, dtype: torch.dtype, timeout: timedelta) -> Tensor:
        """Zeros (elements,) in this rank's part of a new mapping; all ranks of the group call it together.

        Raises:
            NotShared: on all ranks, if one of them cannot have it.
            RuntimeError: of gloo's; a rank did not take part.
        """
        pipes_to = 0 if self._channels else self.size - 1
        room_bytes = elements * dtype.itemsize
        offer = Offer(room_bytes, self.size, pipes_to, huge=True) if self.rank == 0 else None
        opened = offer.channels if offer else []
        with ExitStack() as if_it_fails:
            if_it_fails.callback(close_all, opened)
            try:
                numbers = torch.tensor(offer.numbers if offer else no_offer(pipes_to))
                self.group.broadcast([numbers], from_rank_0(timeout)).wait()
                pipes = self.rank - 1 if pipes_to and self.rank else None
                problem, mapping, channels = accept(numbers.tolist(), range(self.rank, self.rank + 1), pipes)
                opened += channels
                verdicts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
                self.group.allgather([verdicts], [torch.tensor([problem])]).wait(timeout)
            finally:
                if offer is not None:
                    offer.withdraw()
            found = next((int(code) for code in verdicts if code), problem)
            if found or mapping is None:
                raise not_shared(found, self.size * room_bytes)
            if_it_fails.pop_all()
        self._channels += opened
        self._mappings.add(mapping)
        return mapping.part(self.rank, torch.empty(elements, dtype=dtype, device="meta"))

    def parts_like(self, tensor: Tensor) -> list[Tensor] | None:
        """If a tensor (any shape, contiguous) is in this rank's part, what is there in each rank's; else None.

        That is (elements,) each.
        """
        at = tensor.data_ptr()
        for mapping in self._mappings:
            offset = at - mapping.address - self.rank * mapping.part_bytes
            if 0 <= offset < mapping.part_bytes:
                return [mapping.part(rank, tensor, offset) for rank in range(self.size)]
        return None


class SharedWork(ABC):
    """Something in shared memory that has begun, and is done by the thread that waits for it."""

    @abstractmethod
    def wait(self, timeout: timedelta) -> None:
        """Return when it is done; `RuntimeError` as of `Channel.wait` if another rank fails."""


class SharedCollective(SharedWork):
    """A collective of what lies in each rank's part; it has begun when it is made.

    All of it is done in `combine` and `wait`, by the thread that calls them: a thread beside it would need a core.

    Attributes:
        needs_others: whether a rank has the result only when the others have done their shares, and so waits twice.
        named: what its transfer is called, if it has one.
    """

    needs_others: ClassVar[bool] = True
    named: Wait | None = None

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        memory.begun += 1
        memory.divided += self.needs_others
        self._number, self._times_done, self._is_combined = memory.begun, memory.divided, False
        memory.ready.send()
        memory.not_combined.append(self)

    @property
    def is_held_back(self) -> bool:
        """Whether this rank has not yet come to where it does its share, without which no rank gets the result."""
        return self._number > self._memory.asked_for

    def combine(self, deadline: float) -> None:
        """Wait for the others' parts, and do this rank's share, after those of what has begun before."""
        memory = self._memory
        memory.asked_for = max(memory.asked_for, self._number)
        while not self._is_combined:
            first = memory.not_combined[0]
            memory.ready.wait(first._number, deadline)
            first._do_share()
            if first.needs_others:
                memory.done.send()
            memory.not_combined.popleft()
            first._is_combined = True

    def wait(self, timeout: timedelta) -> None:
        deadline = time.perf_counter() + timeout.total_seconds()
        self.combine(deadline)
        if self.needs_others:
            self._memory.done.wait(self._times_done, deadline)

    @abstractmethod
    def _do_share(self) -> None:
        """What this rank has to do when the others' parts are there."""


class SharedCombination(SharedCollective):
    """A combination of what lies at the same place in each rank's part, of which every rank does all.

    That takes more of it than a share would, but no rank waits for the others a second time. So another rank may still
    read a part when this one has the result; it has read it when the next collective has ended.

    The order is that of the ranks, ((x0 + x1) + x2) + …. `result`, of any shape, has as many elements as a part, and
    does not lie in one.
    """

    needs_others = False

    def __init__(self, memory: SharedMemory, parts: list[Tensor], op: ReduceOp.RedOpType, result: Tensor) -> None:
        self._parts, self._op, self._result = parts, op, result.view(-1)
        super().__init__(memory)

    def _do_share(self) -> None:
        operands = [self._result, *self._parts]
        in_a_chunk = max(1, CHUNK_BYTES // self._result.element_size())
        # Of two parts nothing is read again, so nothing needs to stay in the caches.
        chunks = [operands] if len(self._parts) == 2 else zip(*(x.split(in_a_chunk) for x in operands), strict=True)
        for result, *parts in chunks:
            combine_in_order(parts, self._op, result)
            if self._op == ReduceOp.AVG:
                result.div_(self._memory.size)


class SharedReduce(SharedCollective):
    """A combination of what lies at the same place in each rank's part, which the first part gets.

    Each rank combines its share of the elements, over the ranks in their order, ((x0 + x1) + x2) + …
    """

    def __init__(self, memory: SharedMemory, parts: list[Tensor], op: ReduceOp.RedOpType) -> None:
        self._op = op
        elements, item_bytes = parts[0].numel(), parts[0].element_size()
        line = max(1, 64 // item_bytes)  # elements: ranks that wrote to one line of the caches would slow each other
        length = -(-elements // (memory.size * line)) * line
        start = min(elements, memory.rank * length)
        self._share = [part[start : start + length] for part in parts]
        super().__init__(memory)

    def _do_share(self) -> None:
        in_a_chunk = max(1, CHUNK_BYTES // self._share[0].element_size())
        for parts in zip(*(share.split(in_a_chunk) for share in self._share), strict=True):
            result, *others = parts
            combine_in_order(parts, self._op, result)
            self._take(result, others)

    def _take(self, result: Tensor, others: list[Tensor]) -> None:
        """Called for each chunk, with the result, which is in the first part, and the same chunk of the others."""


class SharedAllReduce(SharedReduce):
    """A combination of what lies at the same place in each rank's part, which all parts get.

    So every rank has the same sums, in every run; the average is the sum divided by the ranks.
    """

    def _take(self, result: Tensor, others: list[Tensor]) -> None:
        if self._op == ReduceOp.AVG:
            result.div_(self._memory.size)
        for other in others:
            other.copy_(result)


class SharedBroadcast(SharedCollective):
    """Every rank copies what lies in the part of one rank of the group, (elements,), into its own."""

    def __init__(self, memory: SharedMemory, parts: list[Tensor], source: int = 0) -> None:
        self._source, self._own = parts[source], parts[memory.rank]
        super().__init__(memory)

    def _do_share(self) -> None:
        if self._own is not self._source:
            self._own.copy_(self._source)


class SharedReduceScatter(SharedCollective):
    """A sum of which each rank gets a row: of what is in the parts, (ranks, elements), r's row is added up by rank r.

    The sum is that of `add_in_order` over the ranks.
    """

    def __init__(self, memory: SharedMemory, parts: list[Tensor], own: Tensor) -> None:
        self._rows = [part.view(memory.size, -1)[memory.rank] for part in parts]
        self._own = own.view(-1)
        super().__init__(memory)

    def _do_share(self) -> None:
        add_in_order(self._rows, self._own)


class SharedAllGather(SharedCollective):
    """Every rank copies what the others have: `sources`, (elements,) each, into the rows of `parts`."""

    def __init__(self, memory: SharedMemory, sources: list[Tensor], parts: Tensor) -> None:
        self._sources, self._parts = sources, parts.view(memory.size, -1)
        super().__init__(memory)

    def _do_share(self) -> None:
        for row, source in zip(self._parts, self._sources, strict=True):
            if row.data_ptr() != source.data_ptr():
                row.copy_(source)


def combine_in_order(parts: Sequence[Tensor], op: ReduceOp.RedOpType, result: Tensor) -> None:
    """Combine two or more of one shape and dtype, ((x0 + x1) + x2) + …; an average is not yet divided.

    `result` may be the first of them.
    """
    combine = COMBINE[ReduceOp.SUM if op == ReduceOp.AVG else op]
    first, *others = parts
    for other in others:
        combine(first, other, out=result)
        first = result


def add_in_order(rows: Sequence[Tensor], total: Tensor) -> None:
    """Add up two rows or more, (elements,) each, in their order: ((x0 + x1) + x2) + …

    Numbers of 16 bits are added in float32, and the sum is rounded once. `total`, (elements,), may be one of the rows.
    """
    dtype, in_a_chunk = total.dtype, max(1, CHUNK_BYTES // total.element_size())
    if dtype in (torch.bfloat16, torch.float16):
        dtype = torch.float32
    for into, first, *others in zip(*(row.split(in_a_chunk) for row in (total, *rows)), strict=True):
        in_progress = first.to(dtype) + others[0]
        for other in others[1:]:
            in_progress += other
        into.copy_(in_progress)


def from_rank_0(timeout: timedelta) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, timeout
    return options
