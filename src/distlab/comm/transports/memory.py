"""Memory that the ranks of a group share, in which each of them has a part, and the collectives on it.

The data never leaves memory. The signals "my part is there" and "my work is done" are bytes in pipes, so a wait ends
as any other does: with the signal, at the deadline, or when the other rank dies.
"""

import time
import weakref
from abc import abstractmethod
from collections import deque
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.pending import SharedWork
from distlab.comm.transports.mappings import Mapping, Offer, accept, no_offer, not_shared
from distlab.comm.transports.signals import Channel, Signal, SignalTimeout, close_all

READY, DONE, TURN = 1, 2, 3  # signals
SLOT_BYTES = 1 << 20  # of each of a rank's two slots for tensors that lie elsewhere; a slot stays in the caches
# Tensor-parallel ranks wait for each other every few milliseconds. Waking a thread up takes a tenth of one, and a core
# that has been idle is slow at first.
SPIN_SECONDS = 5e-4
PLACES = 4096  # collectives in place that a rank may start before the first of them has ended on all ranks


class SharedMemory:
    """The mappings that the ranks of a process group share, and the collectives on them, which run in order.

    Args:
        group: torch's group, over which they meet; its ranks are on one host, or `allocate` raises.
        rank: this rank's number in the group.
        size: number of ranks.
        has_own_core: whether no other rank needs the core of a waiting rank, so that it may spin.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, has_own_core: bool) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.begun = 0  # collectives
        self.in_place = 0  # of these, collectives in place; each rank sends READY and DONE once for each
        self.asked_for = 0  # this rank has computed its part up to this one, or is about to
        self.not_done: deque[SharedCollective] = deque()  # this rank's part is not done
        # By number, the same on all ranks. A mapping is freed with the last tensor in it.
        self._mappings: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()
        self._allocated = 0  # mappings
        self._places: list[Any] = []  # by rank, (PLACES, 2): where the tensors of its collectives in place begin
        self._channels: list[Channel] = []  # to other ranks, for signals; made with the first mapping
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
        """Make the slots for tensors that lie elsewhere; all ranks call it together.

        Raises:
            NotShared, RuntimeError: as in `allocate`.
        """
        parts = self._allocate(2 * SLOT_BYTES, torch.uint8, timeout)
        self._slots = [[part[start : start + SLOT_BYTES] for part in parts] for start in (0, SLOT_BYTES)]

    def next_slots(self) -> list[Tensor]:
        """Return every rank's slot for the next turn, (SLOT_BYTES,) uint8 each."""
        self.turns += 1
        return self._slots[self.turns % 2]

    def close(self) -> None:
        """Close the channels; the memory is freed with the last tensor in it."""
        close_all(self._channels)
        self._channels.clear()
        self._slots.clear()
        self._places.clear()

    def allocate(self, elements: int, dtype: torch.dtype, timeout: timedelta) -> Tensor:
        """Return zeros (elements,) in this rank's part of a new mapping; all ranks of the group call it together.

        Raises:
            NotShared: on all ranks, if one of them cannot make or map it.
            RuntimeError: raised by gloo; a rank did not take part.
        """
        own = self._allocate(elements, dtype, timeout)[self.rank]
        if not self._places:
            self._places = [part.view(PLACES, 2).numpy() for part in self._allocate(2 * PLACES, torch.int64, timeout)]
        return own

    def _allocate(self, elements: int, dtype: torch.dtype, timeout: timedelta) -> list[Tensor]:
        """Return all ranks' parts of a new mapping, as `allocate` does this rank's."""
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
        self._allocated += 1
        self._mappings[self._allocated] = mapping
        like = torch.empty(elements, dtype=dtype, device="meta")
        return [mapping.part(rank, like) for rank in range(self.size)]

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the number of a mapping, and the offset in this rank's part at which a tensor begins, in bytes.

        None if the tensor is not in a part of this rank.
        """
        at = tensor.data_ptr()
        for number, mapping in self._mappings.items():
            offset = at - mapping.address - self.rank * mapping.part_bytes
            if 0 <= offset < mapping.part_bytes:
                return number, offset
        return None

    def start_in_place(self, own: Tensor) -> int:
        """Tell the other ranks where this rank's tensor of a collective is, and return the collective's number."""
        if self.in_place - self.done.received >= PLACES:
            raise RuntimeError(f"{PLACES} collectives in shared memory have started before the first was waited for")
        self.in_place += 1
        self._places[self.rank][self.in_place % PLACES] = self.place_of(own)
        self.ready.send()
        return self.in_place

    def parts_of(self, number: int, own: Tensor) -> list[Tensor]:
        """Return all ranks' tensors of a collective in place, (elements,) each, once all ranks have started it.

        Ranks may give tensors that lie at different places in their parts.
        """
        places = [of_rank[number % PLACES].tolist() for of_rank in self._places]
        if any(mapping not in self._mappings for mapping, _ in places):
            raise RuntimeError("another rank gave a tensor in shared memory of which this rank has freed its part")
        return [self._mappings[mapping].part(rank, own, offset) for rank, (mapping, offset) in enumerate(places)]


class InMemory(SharedWork):
    """An operation in shared memory whose signals have a deadline."""

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
        """Do the remaining work, or as much as possible by the deadline; `RuntimeError` as in `wait`."""


class SharedCollective(InMemory):
    """A collective in shared memory; constructing it starts it.

    The thread that calls `wait` does all the work: a second thread would need a core. The collectives of a group are
    completed in the order in which they started.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        memory.begun += 1
        self._number = memory.begun
        memory.not_done.append(self)

    @property
    def is_held_back(self) -> bool:
        """True if this rank has yet to compute its part, without which no rank gets the result."""
        return self._number > self._memory.asked_for

    def is_done(self) -> bool:
        asked_for = self._memory.asked_for
        is_done = super().is_done()
        if not is_done and self in self._memory.not_done:  # this rank may compute for long before it returns here
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
        """Wait for the others' parts, and compute this rank's part; after `SignalTimeout`, the rest of it."""

    def _wait_for_others(self, deadline: float) -> None:
        """Wait until the other ranks have computed their parts, if this rank needs them."""


def from_rank_0(timeout: timedelta) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, timeout
    return options
