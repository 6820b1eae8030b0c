"""Memory that the ranks of a host share: a mapping in which each rank of a group has a part, and its all-reduce.

The data never leaves memory. The signals "my part is there" and "my share is done" are bytes in pipes, so a wait ends
as any other does: with the signal, at the deadline, or when the other rank dies.

The mapping is an anonymous file of rank 0 (`memfd_create`) that the others open through /proc: it has no name in any
folder, only its user may open it, and the kernel frees it when the last of the processes has ended, however it ended.
"""

import mmap
import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.signals import Channel, Pipes, Signal, close_all, open_channel

CHUNK_BYTES = 256 * 1024  # added up at a time, so that a chunk is written back to all parts while it is in the caches
ALIGNED_BYTES = 4096  # parts begin at pages
READY, DONE = 1, 2  # signals
NOT_REACHED = -1  # in place of an error number: another host, user or container
COMBINE: dict[ReduceOp.RedOpType, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}


class Mapping(mmap.mmap):
    """Shared memory with a part for each rank of a group, all of one size."""

    part_bytes: int
    address: int

    @classmethod
    def of(cls, descriptor: int, part_bytes: int, ranks: int) -> "Mapping":
        mapping = cls(descriptor, part_bytes * ranks)
        mapping.part_bytes = part_bytes
        mapping.address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        return mapping

    def part(self, rank: int, like: Tensor, offset_bytes: int = 0) -> Tensor:
        """What lies in a rank's part at an offset, with the size and dtype of `like`: (elements,)."""
        at = rank * self.part_bytes + offset_bytes
        return torch.frombuffer(self, dtype=like.dtype, count=like.numel(), offset=at)


class Offer:
    """What rank 0 offers to the others: an anonymous file for all parts, and pipes if the group has none yet.

    Attributes:
        numbers: where the others find it: process, descriptor, token, bytes of a part; and each rank's ends of the
            pipes. In place of a process and a descriptor, 0 and an error's number.
        channels: this rank's ends of the pipes.
    """

    def __init__(self, part_bytes: int, ranks: int, with_pipes: bool) -> None:
        self.channels: list[Channel] = []
        self._pipes, self._descriptor = Pipes(), -1
        token = secrets.randbits(62)
        try:
            self._descriptor = os.memfd_create(_name(token), os.MFD_CLOEXEC)
            os.fchmod(self._descriptor, 0o600)
            with suppress(OSError):  # a limit on the size of files; then it has no room for the parts
                os.ftruncate(self._descriptor, part_bytes * ranks)
            if with_pipes:
                self.channels = self._pipes.make(ranks - 1)
        except (OSError, AttributeError) as error:  # no such call outside of Linux
            self.numbers = [0, getattr(error, "errno", None) or NOT_REACHED, 0, part_bytes, *[0] * (2 * ranks)]
            return
        ends = [0, 0, *self._pipes.far_ends] if with_pipes else [0] * (2 * ranks)
        self.numbers = [os.getpid(), self._descriptor, token, part_bytes, *ends]

    def withdraw(self) -> None:
        """Close what the others have opened meanwhile."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._pipes.hand_over()


class NotShared(Exception):
    """The ranks of a group cannot share memory; all of them raise it. `is_expected` if they are on several hosts."""

    def __init__(self, sentence: str, is_expected: bool) -> None:
        super().__init__(sentence)
        self.is_expected = is_expected


class SharedMemory:
    """What the ranks of a process group share: mappings, and the collectives on them, which run in their order.

    Args:
        group: its ranks are on one host, or `allocate` raises.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.begun = 0  # collectives
        self.not_combined: deque[SharedCollective] = deque()  # this rank's part is there, its share is not done
        self._mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()  # one goes with the last tensor in it
        self._has_channels = False  # to other ranks, by which they signal; made with the first mapping

    def allocate(self, elements: int, dtype: torch.dtype, timeout: timedelta) -> Tensor:
        """Zeros (elements,) in this rank's part of a new mapping; all ranks of the group call it together.

        Raises:
            NotShared: on all ranks, if one of them cannot have it.
            RuntimeError: of gloo's; a rank did not take part.
        """
        part_bytes = -(-elements * dtype.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES
        offer = Offer(part_bytes, self.size, with_pipes=not self._has_channels) if self.rank == 0 else None
        opened = offer.channels if offer else []
        with ExitStack() as if_it_fails:
            if_it_fails.callback(close_all, opened)
            try:
                numbers = torch.tensor(offer.numbers if offer else [0] * (4 + 2 * self.size))
                self.group.broadcast([numbers], from_rank_0(timeout)).wait()
                problem, mapping = self._accept(numbers.tolist(), part_bytes, opened)
                verdicts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
                self.group.allgather([verdicts], [torch.tensor([problem])]).wait(timeout)
            finally:
                if offer is not None:
                    offer.withdraw()
            found = next(((rank, int(code)) for rank, code in enumerate(verdicts) if code), None)
            if found is not None or mapping is None:
                raise _not_shared(*(found or (self.rank, problem)), part_bytes * self.size)
            if_it_fails.pop_all()
        if not self._has_channels:
            passes_on, self._has_channels = self.rank == 0 and self.size > 2, True
            self.ready, self.done = (Signal(signal, opened, passes_on) for signal in (READY, DONE))
        self._mappings.add(mapping)
        return mapping.part(self.rank, torch.empty(elements, dtype=dtype, device="meta"))

    def _accept(self, numbers: list[int], part_bytes: int, opened: list[Channel]) -> tuple[int, Mapping | None]:
        """Open and map what rank 0 offers; 0 or an error's number, and the mapping. Adds a new channel to `opened`."""
        process, number, token, offered_bytes, *ends = numbers
        assert offered_bytes == part_bytes, f"shared memory of {offered_bytes} bytes on rank 0, {part_bytes} here"
        if not process:
            return number, None
        path, own = f"/proc/{process}/fd/{number}", -1
        try:
            if os.readlink(path) != f"/memfd:{_name(token)} (deleted)":  # another host's process of that number
                return NOT_REACHED, None
            own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            # What is not reserved would end the process at its first use (SIGBUS) if there were no memory left.
            os.posix_fallocate(own, self.rank * part_bytes, part_bytes)
            if self.rank > 0 and not self._has_channels:
                opened.append(open_channel(process, *ends[2 * self.rank : 2 * self.rank + 2]))
            return 0, Mapping.of(own, part_bytes, self.size)
        except (FileNotFoundError, PermissionError):
            return NOT_REACHED, None
        except OSError as error:
            return error.errno or NOT_REACHED, None
        finally:
            if own >= 0:
                os.close(own)

    def parts_like(self, tensor: Tensor) -> list[Tensor] | None:
        """If a tensor (any shape) is in this rank's part, what is there in each rank's: (elements,) each; else None."""
        at = tensor.data_ptr()
        for mapping in self._mappings:
            offset = at - mapping.address - self.rank * mapping.part_bytes
            if 0 <= offset < mapping.part_bytes:
                return [mapping.part(rank, tensor, offset) for rank in range(self.size)]
        return None


class SharedCollective:
    """A collective of what lies in each rank's part; it has begun when it is made.

    All of it is done in `combine` and `wait`, by the thread that calls them: a thread beside it would need a core.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        memory.begun += 1
        self._number, self._is_combined = memory.begun, False  # each signal is sent once in each collective
        memory.ready.send()
        memory.not_combined.append(self)

    def combine(self, deadline: float) -> None:
        """Wait for the others' parts, and do this rank's share, after those of what has begun before."""
        memory = self._memory
        while not self._is_combined:
            first = memory.not_combined[0]
            memory.ready.wait(first._number, deadline)
            first._do_share()
            memory.done.send()
            memory.not_combined.popleft()
            first._is_combined = True

    def wait(self, timeout: timedelta) -> None:
        """Return when all shares are done; `RuntimeError` as of `Channel.wait` if another rank fails."""
        deadline = time.perf_counter() + timeout.total_seconds()
        self.combine(deadline)
        self._memory.done.wait(self._number, deadline)

    def _do_share(self) -> None:
        """What this rank has to do when the others' parts are there."""
        raise NotImplementedError


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
        combine = COMBINE[self._op]
        in_a_chunk = max(1, CHUNK_BYTES // self._share[0].element_size())
        for result, *others in zip(*(share.split(in_a_chunk) for share in self._share), strict=True):
            for other in others:
                combine(result, other, out=result)
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
    """Every rank copies what lies in the first part, (elements,), into its own."""

    def __init__(self, memory: SharedMemory, parts: list[Tensor]) -> None:
        self._first, self._own = parts[0], parts[memory.rank]
        super().__init__(memory)

    def _do_share(self) -> None:
        if self._memory.rank > 0:
            self._own.copy_(self._first)


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


def _name(token: int) -> str:
    return f"lab-{token:016x}"


def from_rank_0(timeout: timedelta) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, timeout
    return options


def _not_shared(rank: int, code: int, total_bytes: int) -> NotShared:
    if code == NOT_REACHED:
        return NotShared(f"rank {rank} cannot open memory of the first rank", is_expected=True)
    return NotShared(f"no {total_bytes / 1e6:,.1f} MB of shared memory: {os.strerror(code)}", is_expected=False)
