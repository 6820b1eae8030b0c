"""Memory that the ranks of a group share, in which each of them has a part, and the transports that make it.

The data never leaves memory. The signals "my part is there" and "my work is done" are bytes in pipes, so a wait ends
as any other does: with the signal, at the deadline, or when the other rank dies.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.transports.mappings import Mapping, NotShared, Offer, accept, no_offer, not_shared, share_less
from distlab.comm.transports.signals import Channel, Signal, close_all
from distlab.comm.transports.transport import Members, Transport
from distlab.comm.waits import Wait

MadeT = TypeVar("MadeT")
Address = tuple[int, int]  # the number of a mapping, and an offset in this rank's part of it, in bytes

READY, DONE, TURN = 1, 2, 3  # signals
SLOT_BYTES = 1 << 20  # of each of a rank's two slots for tensors that lie elsewhere; a slot stays in the caches
# Tensor-parallel ranks wait for each other every few milliseconds. Waking a thread up takes a tenth of one, and a core
# that has been idle is slow at first.
SPIN_SECONDS = 5e-4
PLACES = 4096  # collectives that may be under way; the next one waits for the first of them


class SharedMemory:
    """The mappings that the ranks of a process group share, and the signals by which they take turns.

    Args:
        group: torch's group, over which they meet; its ranks are on one host, or `allocate` raises.
        rank: this rank's number in the group.
        size: number of ranks.
        has_own_core: return whether no other rank needs the core of a waiting rank, so that it may spin.

    Attributes:
        ready: the signal that this rank has filled its tensor of a collective in place.
        done: the signal that this rank has computed its part of a collective in place.
        turn: the signal that this rank has put the next piece of a tensor into its slot.
        addresses: by rank, of its last collectives in place: the numbers of an `Address` for each.
        calls: by rank, of its last collectives: for each, how the rank called it (`collectives.Call.packed`).
    """

    ready: Signal
    done: Signal
    turn: Signal

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, has_own_core: Callable[[], bool]) -> None:
        self.group, self.rank, self.size, self._has_own_core = group, rank, size, has_own_core
        # By number, the same on all ranks. A mapping is freed with the last tensor in it.
        self._mappings: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()
        self._allocated = 0  # mappings
        self.addresses: list[memoryview] = []
        self.calls: list[memoryview] = []
        self._channels: list[Channel] = []  # to other ranks, for signals; made with the first mapping
        self._slots: list[list[Tensor]] = []  # two, each by rank: (SLOT_BYTES,) uint8

    def has_slots(self) -> bool:
        return bool(self._slots)

    def make_slots(self, timeout: timedelta) -> None:
        """Make the slots for tensors that lie elsewhere; all ranks call it together.

        Raises:
            NotShared, RuntimeError: as in `allocate`.
        """
        parts = self._allocate(2 * SLOT_BYTES, torch.uint8, timeout)
        self._make_tables(timeout)
        self._slots = [[part[start : start + SLOT_BYTES] for part in parts] for start in (0, SLOT_BYTES)]

    def next_slots(self) -> list[Tensor]:
        """Return every rank's slot for the next turn, (SLOT_BYTES,) uint8 each."""
        return self._slots[self.turn.sent % 2]

    def close(self) -> None:
        """Close the channels; the memory is freed with the last tensor in it."""
        close_all(self._channels)
        for kept in (self._channels, self._slots, self.addresses, self.calls, self._mappings):
            kept.clear()

    def allocate(self, elements: int, dtype: torch.dtype, timeout: timedelta) -> Tensor:
        """Return zeros (elements,) in this rank's part of a new mapping; all ranks of the group call it together.

        Raises:
            NotShared: on all ranks, if one of them cannot make or map it.
            RuntimeError: raised by gloo; a rank did not take part.
        """
        own = self._allocate(elements, dtype, timeout)[self.rank]
        self._make_tables(timeout)
        return own

    def _make_tables(self, timeout: timedelta) -> None:
        if not self.addresses:
            tables = [part.numpy().data for part in self._allocate(3 * PLACES, torch.int64, timeout)]
            self.addresses = [table[: 2 * PLACES] for table in tables]
            self.calls = [table[2 * PLACES :] for table in tables]

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
        if not self._allocated:
            passes_on, spin_seconds = self.rank == 0 and self.size > 2, SPIN_SECONDS if self._has_own_core() else 0.0
            self.ready, self.done, self.turn = (
                Signal(signal, self._channels, passes_on, spin_seconds) for signal in (READY, DONE, TURN)
            )
            if passes_on:
                for channel in self._channels:
                    channel.after_read += [signal.receive for signal in (self.ready, self.done, self.turn)]
        self._allocated += 1
        self._mappings[self._allocated] = mapping
        like = torch.empty(elements, dtype=dtype, device="meta")
        return [mapping.part(rank, like) for rank in range(self.size)]

    def part(self, rank: int, address: Address, like: Tensor) -> Tensor:
        """Return the tensor of a rank that begins at an address, with the size and dtype of `like`: (elements,)."""
        number, offset = address
        if number not in self._mappings:
            raise RuntimeError("another rank gave a tensor in shared memory of which this rank has freed its part")
        return self._mappings[number].part(rank, like, offset)

    def address_of(self, tensor: Tensor) -> Address | None:
        """Return where a tensor begins; None if it is not in a part of this rank."""
        at = tensor.data_ptr()
        for number, mapping in self._mappings.items():
            offset = at - mapping.address - self.rank * mapping.part_bytes
            if 0 <= offset < mapping.part_bytes:
                return number, offset
        return None


class MemoryTransport(Transport, ABC):
    """A transport that makes memory on the first request, if the ranks can share it.

    Args:
        members: the ranks; some of them are on one host.
        takes_all: whether tensors also travel here that are too small to be worth it.
    """

    smallest_bytes: int  # of tensors that are worth it

    def __init__(self, members: Members, takes_all: bool) -> None:
        self.members, self._takes_all = members, takes_all
        self._can_make = True

    def together(self, make: Callable[[], MadeT]) -> MadeT | None:
        """Call `make`, which makes memory; None if these ranks cannot share it. All ranks call it together.

        Raises:
            InputError: the transport is "shared", and these ranks cannot share memory.
            TrafficError: a rank does not take part.
        """
        context = self.members.context
        if not self._can_make:
            return None
        try:
            with context.waits.during(Wait("shared memory", "other", self.members.others)):
                made = make()
        except NotShared as error:
            share_less(context, error, is_first=any(here[0] == context.rank for here in self.members.by_host))
            self._can_make = False  # memory that was made before stays shared
            return None
        context.shares_memory = True
        return made

    @property
    def limit(self) -> timedelta:
        """The longest time that a wait may take."""
        return timedelta(seconds=self.members.context.waits.timeout_seconds)

    def is_worth_it(self, size_bytes: int, like: Tensor) -> bool:
        return like.is_cpu and (self._takes_all or size_bytes >= self.smallest_bytes)

    def empty(self, elements: int, like: Tensor, overlaps: bool) -> Tensor | None:
        """Return zeros (elements,) in memory that the ranks share, or None; see `distlab.comm.group.empty`."""
        if not self.is_worth_it(elements * like.itemsize, like):
            return None
        return self.together(lambda: self.allocate(elements, like.dtype))

    @abstractmethod
    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeros (elements,) in this rank's part of new memory."""

    def shares(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in memory of one host that all ranks of the group share."""
        return False

    def held_back(self) -> list[Wait]:
        """Return the collectives of which this rank has yet to compute its part. Other threads may call this."""
        return []


def from_rank_0(timeout: timedelta) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, timeout
    return options
