"""Memory that the ranks of a group share, in which each of them has a part, and the transports that make it.

The data never leaves memory. The signal that a rank begins a turn is a byte in a pipe. So a wait ends as any other
does: with the signal, at the deadline, or when the other rank dies.
"""

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.transports.mappings import Mapping, NotShared, share, share_less
from distlab.comm.transports.signals import Channel, Turns, close_all
from distlab.comm.transports.transport import Members, Transport
from distlab.comm.waits import Wait

MadeT = TypeVar("MadeT")
Address = tuple[int, int]  # the number of a mapping, and an offset in this rank's part of it, in bytes

# A rank has two slots, used in turn, each for a header and a piece of a tensor. They stay in the caches.
NUMBERS, HEADER_BYTES, SLOT_BYTES = 6, 64, (1 << 20) - 64
# Tensor-parallel ranks wait for each other every few milliseconds. Waking a thread up takes a tenth of one, and a core
# that has been idle is slow at first.
SPIN_SECONDS = 5e-4


class SharedMemory:
    """The mappings that the ranks of a process group share, and the turns that they take in it.

    In each turn, a rank writes into its slot, then waits until all others have begun the turn, and reads theirs. It
    writes into the same slot again two turns later: by then all have begun the turn between, and so have read the slot.

    Args:
        group: torch's group, over which they meet; its ranks are on one host, or `allocate` raises.
        ranks: of the group, by their numbers in the world.
        rank: this rank's number in the group.
        has_own_core: return whether no other rank needs the core of a waiting rank, so that it may spin.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, has_own_core: Callable[[], bool]
    ) -> None:
        self.group, self.ranks, self.rank, self.size, self._has_own_core = group, ranks, rank, len(ranks), has_own_core
        # By number, the same on all ranks. A mapping is freed with the last tensor in it.
        self._mappings: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()
        self._allocated = 0  # mappings
        self._channels: list[Channel] = []  # to other ranks, for signals; made with the first mapping
        self.turns = Turns([], False, 0.0)
        self._slots: list[list[Tensor]] = []  # two, each by rank: (SLOT_BYTES,) uint8
        self._headers: list[list[memoryview]] = []  # of these slots: integers
        self.not_done: deque[Any] = deque()  # `SharedCollective`s of which this rank has yet to do its part
        self.started = 0  # collectives
        self.asked_for = 0  # this rank has computed its part of the collectives up to this one, or is about to

    def has_slots(self) -> bool:
        return bool(self._slots)

    def make_slots(self, timeout: timedelta) -> None:
        """Make the slots; all ranks call it together. It raises the same as `allocate`, which also makes them."""
        whole = torch.empty(2, HEADER_BYTES + SLOT_BYTES, dtype=torch.uint8, device="meta")
        mapping = self._new_mapping(whole.nbytes, timeout)
        by_rank = [mapping.part(rank, whole).view_as(whole) for rank in range(self.size)]
        self._slots = [[part[turn, HEADER_BYTES:] for part in by_rank] for turn in range(2)]
        headers = [[part[turn, :HEADER_BYTES].view(torch.int64) for part in by_rank] for turn in range(2)]
        self._headers = [[header.numpy().data for header in of_turn] for of_turn in headers]

    def allocate(self, elements: int, dtype: torch.dtype, timeout: timedelta) -> Tensor:
        """Return zeros (elements,) in this rank's part of a new mapping; all ranks of the group call it together.

        Raises:
            NotShared: on all ranks, if one of them cannot make or map it.
            RuntimeError: raised by gloo; a rank did not take part.
        """
        like = torch.empty(elements, dtype=dtype, device="meta")
        mapping = self._new_mapping(like.nbytes, timeout)
        self._allocated += 1
        self._mappings[self._allocated] = mapping
        if not self.has_slots():
            self.make_slots(timeout)
        return mapping.part(self.rank, like)

    def _new_mapping(self, room_bytes: int, timeout: timedelta) -> Mapping:
        """Return a mapping with a part for each rank."""

        def worst(problem: int) -> int:
            verdicts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            self.group.allgather([verdicts], [torch.tensor([problem])]).wait(timeout)
            return next((int(code) for code in verdicts if code), 0)

        def tell(numbers: Tensor) -> None:
            self.group.broadcast([numbers], from_rank_0(timeout)).wait()

        pipes_to, reserved = 0 if self._channels else self.size - 1, range(self.rank, self.rank + 1)
        mapping, channels = share(self.rank, room_bytes, self.size, reserved, pipes_to, tell, worst, huge=True)
        if channels:
            self._channels = channels
            spin_seconds = SPIN_SECONDS if self._has_own_core() else 0.0
            self.turns = Turns(channels, self.rank == 0 and self.size > 2, spin_seconds)
        return mapping

    def close(self) -> None:
        """Close the channels; the memory is freed with the last tensor in it."""
        close_all(self._channels)
        for kept in (self._channels, self._slots, self._headers, self._mappings):
            kept.clear()

    def announce(self, numbers: Sequence[int]) -> None:
        """Write `NUMBERS` integers into the header of this rank's slot for the next turn."""
        header = self._headers[(self.turns.begun + 1) % 2][self.rank]
        for place, number in enumerate(numbers):
            header[place] = number

    def announced(self) -> list[list[int]]:
        """Return, by rank, what is in the headers of this turn, which all ranks have begun."""
        return [header[:NUMBERS].tolist() for header in self._headers[self.turns.begun % 2]]

    def next_slots(self) -> list[Tensor]:
        """Return every rank's slot for the next turn, (SLOT_BYTES,) uint8 each."""
        return self._slots[(self.turns.begun + 1) % 2]

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
            share_less(context, error, is_first=context.rank in self.members.first_of_hosts)
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
