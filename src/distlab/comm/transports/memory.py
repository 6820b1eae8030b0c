"""Memory that the ranks of a group share, in which each of them has a part, and the collectives on it.

The data never leaves memory. The signals "my part is there" and "my share is done" are bytes in pipes, so a wait ends
as any other does: with the signal, at the deadline, or when the other rank dies.
"""

import time
import weakref
from abc import abstractmethod
from collections import deque
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.pending import SharedWork
from distlab.comm.transports.mappings import Mapping, Offer, accept, no_offer, not_shared
from distlab.comm.transports.signals import Channel, Signal, SignalTimeout, close_all

READY, DONE, TURN = 1, 2, 3  # signals
SLOT_BYTES = 1 << 20  # of the two that each rank has for tensors that lie elsewhere; it stays in the caches
# Tensor-parallel ranks wait for each other every few milliseconds. Waking a thread up takes a tenth of one, and a core
# that has been idle is slow at first.
SPIN_SECONDS = 5e-4


class SharedMemory:
    """What the ranks of a process group share: mappings, and the collectives on them, which run in their order.

    Args:
        group: torch's, over which they meet; its ranks are on one host, or `allocate` raises.
        rank: of this one in the group.
        size: number of ranks.
        has_own_core: whether no other rank needs the core of one that waits, so that it may spin.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, has_own_core: bool) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.begun = 0  # collectives
        self.in_place = 0  # of these, those of parts of the memory; each rank sends READY and DONE once for each
        self.asked_for = 0  # this rank has done its share up to this one, or is about to
        self.not_done: deque[SharedCollective] = deque()  # this rank's share is not done
        self._mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()  # one goes with the last tensor in it
        self._channels: list[Channel] = []  # to other ranks, by which they signal; made with the first mapping
        passes_on = self.rank == 0 and self.size > 2
        spin_seconds = SPIN_SECONDS if has_own_core else 0.0
        self.ready, self.done, self.turn = (
            Signal(signal, self._channels, passes_on, spin_seconds) for signal in (READY, DONE, TURN)
        )
        self.turns = 0  # of passing pieces of tensors through the slots
        self._slots: list[list[Tensor]] = []  # two, each by rank: (SLOT_BYTES,) uint8

    def has_slots(self) -> bool:
        return bool(self._slots)

    def make_slots(self, timeout: timedelta) -> None:
        """Make the slots through which tensors pass that lie elsewhere; all ranks call it together.

        Raises:
            NotShared, RuntimeError: as `allocate`.
        """
        own = self.allocate(2 * SLOT_BYTES, torch.uint8, timeout)
        parts = self.parts_like(own)
        assert parts is not None
        self._slots = [[part[start : start + SLOT_BYTES] for part in parts] for start in (0, SLOT_BYTES)]

    def next_slots(self) -> list[Tensor]:
        """Every rank's slot for the next turn, (SLOT_BYTES,) uint8 each."""
        self.turns += 1
        return self._slots[self.turns % 2]

    def close(self) -> None:
        """Close the channels; the memory goes with the last tensor in it."""
        close_all(self._channels)
        self._channels.clear()
        self._slots.clear()

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


class InMemory(SharedWork):
    """Something in shared memory whose signals have a deadline."""

    def wait(self, timeout: timedelta) -> None:
        self.advance(time.perf_counter() + timeout.total_seconds())

    def is_done(self) -> bool:
        try:
            self.advance(deadline=0.0)
        except SignalTimeout:
            return False
        return True

    @abstractmethod
    def advance(self, deadline: float) -> None:
        """Do what is left, or what can be done by the deadline; `RuntimeError` as of `wait`."""


class SharedCollective(InMemory):
    """A collective in shared memory; it has begun when it is made.

    All of it is done in `wait`, by the thread that calls it: a thread beside it would need a core. The collectives of a
    group are done in the order in which they have begun.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        memory.begun += 1
        self._number = memory.begun
        memory.not_done.append(self)

    @property
    def is_held_back(self) -> bool:
        """Whether this rank has yet to do its share, without which no rank gets the result."""
        return self._number > self._memory.asked_for

    def is_done(self) -> bool:
        asked_for = self._memory.asked_for
        is_done = super().is_done()
        if not is_done and self in self._memory.not_done:  # this rank may compute for long before it comes again
            self._memory.asked_for = asked_for
        return is_done

    def advance(self, deadline: float) -> None:
        memory = self._memory
        memory.asked_for = max(memory.asked_for, self._number)
        while memory.not_done and memory.not_done[0]._number <= self._number:
            memory.not_done[0]._do_share(deadline)
            memory.not_done.popleft()
        self._wait_for_others(deadline)

    @abstractmethod
    def _do_share(self, deadline: float) -> None:
        """Wait for the others' parts, and do this rank's share; after `SignalTimeout`, the rest of it."""

    def _wait_for_others(self, deadline: float) -> None:
        """Wait until the other ranks have done their shares, if this rank needs them."""


def from_rank_0(timeout: timedelta) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, timeout
    return options
