"""Memory that the ranks of a host share: a mapping in which each rank of a group has a part, and its all-reduce.

The data never leaves memory. The signals "my part is there" and "my share is done" are messages of one byte over the
process group, so a wait ends as any other does: with the message, at the deadline, or when the other rank dies.

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
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

CHUNK_BYTES = 256 * 1024  # added up at a time, so that a chunk is written back to all parts while it is in the caches
ALIGNED_BYTES = 4096  # parts begin at pages
READY, DONE = 7001, 7002  # tags of the signals; the lab's other messages have tag 0
SECONDS_MORE = 0.5  # that the first rank waits: when its wait fails, gloo closes connections that the others wait for
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


class NotShared(Exception):
    """The ranks of a group cannot share memory; all of them raise it. `is_expected` if they are on several hosts."""

    def __init__(self, sentence: str, is_expected: bool) -> None:
        super().__init__(sentence)
        self.is_expected = is_expected


class Signal:
    """A signal that all ranks of a group send again and again, counted: messages of one byte.

    Two ranks send it to each other. More send it to the first, which passes it on when it has come from all: two
    messages in a row, but fewer in total, and where ranks share cores every message takes a core from another rank.

    A receive is posted before its message is sent wherever that is possible: gloo then sends at once, without asking.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group, self._tag = group, tag
        self._passes_on = group.rank() == 0 and group.size() > 2
        others = [peer for peer in range(group.size()) if peer != group.rank()]
        self._peers = others if self._passes_on or len(others) < 2 else [0]
        self._byte, self._received_bytes = (
            torch.zeros(1, dtype=torch.uint8),
            torch.zeros(group.size(), dtype=torch.uint8),
        )
        self._receives: deque[list[dist.Work]] = deque()  # of one signal, from all others
        self._sends: deque[list[dist.Work]] = deque()
        self._expected = self._received = self._sent = 0
        self.expect(1)

    def expect(self, times: int) -> None:
        """Be ready to receive it so many times, counted from the beginning."""
        while self._expected < times:
            into = [(self._received_bytes[peer : peer + 1], peer) for peer in self._peers]
            self._receives.append([self._group.recv([byte], peer, self._tag) for byte, peer in into])
            self._expected += 1

    def send(self) -> None:
        """Send it; the first rank passes it on when it has come from the others."""
        if not self._passes_on:
            self._send()

    def _send(self) -> None:
        self._sends.append([self._group.send([self._byte], peer, self._tag) for peer in self._peers])

    def wait(self, times: int, deadline: float) -> None:
        """Return when all others have sent it so many times; `RuntimeError` of gloo's at the deadline."""
        while self._received < times:
            for receive in self._receives[0]:
                receive.wait(_until(deadline + SECONDS_MORE * self._passes_on))
            self._receives.popleft()
            self._received += 1
            if self._passes_on:
                self._send()

    def wait_for_sends(self, times: int, deadline: float) -> None:
        """Return when this rank's own have arrived so many times: a send that is dropped before may never arrive."""
        while self._sent < times:
            for send in self._sends[0]:
                send.wait(_until(deadline))
            self._sends.popleft()
            self._sent += 1


class SharedMemory:
    """What the ranks of a process group share: mappings, and the collectives on them, which run in their order.

    Args:
        group: its ranks are on one host, or `allocate` raises.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.ready, self.done = Signal(group, READY), Signal(group, DONE)
        self.begun = 0  # collectives
        self.not_combined: deque[SharedCollective] = deque()  # this rank's part is there, its share is not done
        self._mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()  # one goes with the last tensor in it

    def allocate(self, elements: int, dtype: torch.dtype, timeout: timedelta) -> Tensor:
        """Zeros (elements,) in this rank's part of a new mapping; all ranks of the group call it together.

        Raises:
            NotShared: on all ranks, if one of them cannot have it.
            RuntimeError: of gloo's; a rank did not take part.
        """
        part_bytes = -(-elements * dtype.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES
        descriptor, offer = self._offer(part_bytes) if self.rank == 0 else (-1, torch.zeros(4, dtype=torch.int64))
        try:
            self.group.broadcast([offer], from_rank_0(timeout)).wait()
            problem, mapping = self._accept(offer, part_bytes)
            verdicts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            self.group.allgather([verdicts], [torch.tensor([problem])]).wait(timeout)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        found = next(((rank, int(code)) for rank, code in enumerate(verdicts) if code), None)
        if found is not None or mapping is None:
            raise _not_shared(*(found or (self.rank, problem)), part_bytes * self.size)
        self._mappings.add(mapping)
        return mapping.part(self.rank, torch.empty(elements, dtype=dtype, device="meta"))

    def _offer(self, part_bytes: int) -> tuple[int, Tensor]:
        """A new anonymous file, and where the others find it: (process, descriptor, token, bytes of a part)."""
        token = secrets.randbits(62)
        try:
            descriptor = os.memfd_create(_name(token), os.MFD_CLOEXEC)
        except (OSError, AttributeError) as error:  # no such call outside of Linux
            return -1, torch.tensor([0, getattr(error, "errno", None) or NOT_REACHED, 0, part_bytes])
        os.fchmod(descriptor, 0o600)
        with suppress(OSError):  # a limit on the size of files; then it has no room for the parts
            os.ftruncate(descriptor, part_bytes * self.size)
        return descriptor, torch.tensor([os.getpid(), descriptor, token, part_bytes])

    def _accept(self, offer: Tensor, part_bytes: int) -> tuple[int, Mapping | None]:
        """Open and map what rank 0 offers; 0 or an error's number, and the mapping."""
        process, number, token, offered_bytes = map(int, offer)
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
        for signal in (memory.ready, memory.done):
            signal.expect(self._number + 1)
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
        """Return when all shares are done; `RuntimeError` of gloo's if another rank fails."""
        deadline = time.perf_counter() + timeout.total_seconds()
        self.combine(deadline)
        self._memory.done.wait(self._number, deadline)
        for signal in (self._memory.ready, self._memory.done):
            signal.wait_for_sends(self._number, deadline)

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


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline - time.perf_counter()))


def from_rank_0(timeout: timedelta) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, timeout
    return options


def _not_shared(rank: int, code: int, total_bytes: int) -> NotShared:
    if code == NOT_REACHED:
        return NotShared(f"rank {rank} cannot open memory of the first rank", is_expected=True)
    return NotShared(f"no {total_bytes / 1e6:,.1f} MB of shared memory: {os.strerror(code)}", is_expected=False)
