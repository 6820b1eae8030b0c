"""Memory that the ranks of a host share, in which each of them has a part, and their turns in it.

The data never leaves memory. The signal that a rank begins a turn is a byte in a pipe. So a wait ends as any other
does: with the signal, at the deadline, or when the other rank dies.
"""

import struct
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.pending import SharedWork
from distlab.comm.transports.mappings import Mapping, share
from distlab.comm.transports.signals import SECONDS_MORE, Channel, close_all, wait_for_all

Address = tuple[int, int]  # the number of a mapping, from 1, and an offset in a rank's part of it, in bytes
ELSEWHERE: Address = 0, 0  # outside of shared memory

# A rank has two slots, used in turn, each for a header and a piece of a tensor. They stay in the caches. The header
# has the address of the rank's tensor, and what the rank has called.
HEADER = struct.Struct("qq112s")
SLOT_BYTES = (1 << 20) - HEADER.size
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
        has_own_core: whether no other rank needs the core of a waiting rank, so that it may spin.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, has_own_core: bool) -> None:
        self.group, self.ranks, self.rank, self.size = group, ranks, rank, len(ranks)
        self._spin_seconds = SPIN_SECONDS if has_own_core else 0.0
        # By number, the same on all ranks. A mapping is freed with the last tensor in it.
        self._mappings: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()
        self._allocated = 0  # mappings
        self._channels: list[Channel] = []  # to other ranks, for signals; made with the first mapping
        self.turns = Turns([], False, 0.0)
        self._slots: list[list[Tensor]] = []  # two, each by rank: (SLOT_BYTES,) uint8
        self._headers: list[list[memoryview]] = []  # of these slots
        self.not_done: deque[SharedCollective] = deque()  # of which this rank has yet to do its part

    def has_slots(self) -> bool:
        return bool(self._slots)

    def make_slots(self) -> None:
        """Make the slots; all ranks call it together. It raises the same as `allocate`, which also makes them."""
        whole = torch.empty(2, HEADER.size + SLOT_BYTES, dtype=torch.uint8, device="meta")
        mapping = self._new_mapping(whole.nbytes)
        by_rank = [mapping.part(rank, whole).view_as(whole) for rank in range(self.size)]
        self._slots = [[part[turn, HEADER.size :] for part in by_rank] for turn in range(2)]
        self._headers = [[part[turn, : HEADER.size].numpy().data for part in by_rank] for turn in range(2)]

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeros (elements,) in this rank's part of a new mapping; all ranks of the group call it together.

        Raises:
            NotShared: on all ranks, if one of them cannot make or map it.
            RuntimeError: raised by gloo; a rank did not take part.
        """
        like = torch.empty(elements, dtype=dtype, device="meta")
        mapping = self._new_mapping(like.nbytes)
        self._allocated += 1
        self._mappings[self._allocated] = mapping
        if not self.has_slots():
            self.make_slots()
        return mapping.part(self.rank, like)

    def _new_mapping(self, room_bytes: int) -> Mapping:
        """Return a mapping with a part for each rank."""

        def worst(problem: int) -> int:
            verdicts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            self.group.allgather([verdicts], [torch.tensor([problem])]).wait()
            return next((int(code) for code in verdicts if code), 0)

        def tell(numbers: Tensor) -> None:
            self.group.broadcast([numbers], dist.BroadcastOptions()).wait()

        pipes_to, reserved = 0 if self._channels else self.size - 1, range(self.rank, self.rank + 1)
        mapping, channels = share(self.rank, room_bytes, self.size, reserved, pipes_to, tell, worst, huge=True)
        if channels:
            self._channels = channels
            self.turns = Turns(channels, self.rank == 0 and self.size > 2, self._spin_seconds)
        return mapping

    def close(self) -> None:
        """Close the channels; the memory is freed with the last tensor in it."""
        close_all(self._channels)
        for kept in (self._channels, self._slots, self._headers, self._mappings):
            kept.clear()

    def announce(self, address: Address, call: str) -> None:
        """Write into the header of this rank's slot for the next turn where its tensor begins, and what it called."""
        header = self._headers[(self.turns.begun + 1) % 2][self.rank]
        HEADER.pack_into(header, 0, *address, call.encode())

    def announced(self) -> list[tuple[Address, str]]:
        """Return, by rank, what is in the headers of this turn, which all ranks have begun."""
        headers = map(HEADER.unpack, self._headers[self.turns.begun % 2])
        return [((number, offset), call.rstrip(b"\0").decode()) for number, offset, call in headers]

    def next_slots(self) -> list[Tensor]:
        """Return every rank's slot for the next turn, (SLOT_BYTES,) uint8 each."""
        return self._slots[(self.turns.begun + 1) % 2]

    def parts(self, like: Tensor) -> list[Tensor]:
        """Return, by rank, the tensors at the addresses that are announced, of `like`'s size and dtype: (elements,)."""
        found = []
        for rank, ((number, offset), _) in enumerate(self.announced()):
            if number not in self._mappings:
                raise RuntimeError("another rank gave a tensor in shared memory of which this rank has freed its part")
            found.append(self._mappings[number].part(rank, like, offset))
        return found

    def address_of(self, tensor: Tensor) -> Address:
        """Return where a tensor begins; `ELSEWHERE` if it is not in a part of this rank."""
        at = tensor.data_ptr()
        for number, mapping in self._mappings.items():
            offset = at - mapping.address - self.rank * mapping.part_bytes
            if 0 <= offset < mapping.part_bytes:
                return number, offset
        return ELSEWHERE


class Turns:
    """The turns of the ranks of a group: each begins a turn, then waits until all the others have begun it.

    Two ranks signal each other. More signal the first, which answers when the signals of all have arrived: two signals
    in a row, but fewer in total, and where ranks share cores every signal takes a core from another rank.

    Args:
        channels: to the first rank, or, on the first rank, to all others.
        answers: whether this is the first of more than two ranks.
        spin_seconds: time for which a wait keeps its core before it sleeps.
    """

    def __init__(self, channels: Sequence[Channel], answers: bool, spin_seconds: float) -> None:
        self._channels, self._answers, self._spin_seconds = channels, answers, spin_seconds
        self.begun = self._answered = 0  # turns

    def begin(self) -> None:
        """Begin the next turn; this rank must have waited for the one before."""
        self.begun += 1
        if not self._answers:
            self._signal()

    def wait(self, deadline: float) -> None:
        """Return when all others have begun this turn; `RuntimeError` as in `wait_for_all`."""
        wait_for_all(self._channels, self.begun, deadline + SECONDS_MORE * self._answers, self._spin_seconds)
        if self._answers and self._answered < self.begun:
            self._answered = self.begun
            self._signal()

    def _signal(self) -> None:
        for channel in self._channels:
            channel.send()


class SharedCollective(SharedWork):
    """A collective in shared memory; constructing it starts it. They are completed in the order of their starts.

    A collective is written as a generator: at each `yield`, this rank begins a turn, and the generator continues when
    all others have begun it too. The thread that calls `wait` does all the work: a second thread would need a core.

    Args:
        address: of this rank's tensor, or `ELSEWHERE`.
        call: the collective in words, for a rank that has called another (`call_of`).
        turns: does this rank's part.

    Attributes:
        is_held_back: this rank has yet to compute its part, without which no rank gets the result.
    """

    def __init__(self, memory: SharedMemory, address: Address, call: str, turns: Iterator[None]) -> None:
        self._memory, self._address, self._call, self._turns = memory, address, call, turns
        self.is_held_back = True
        self._taken = 0  # turns
        self._is_over = False
        self._error: Exception | None = None  # of `turns`, which then has ended
        memory.not_done.append(self)
        if memory.not_done[0] is self:
            self._take_turn()  # the others need not wait for it later

    def advance(self, deadline: float) -> None:
        memory = self._memory
        if deadline and not self._is_over:  # without a deadline, it may be long until this rank returns here
            for begun in memory.not_done:
                begun.is_held_back = False
                if begun is self:
                    break
        while not self._is_over:
            if not memory.has_slots():
                raise RuntimeError("the group of this collective was destroyed before the collective was waited for")
            memory.not_done[0]._complete(deadline)
            memory.not_done.popleft()

    def _complete(self, deadline: float) -> None:
        while not self._is_over:
            if self._taken:
                self._memory.turns.wait(deadline)
            if self._taken == 1:
                self._refuse_different_calls()
            self._take_turn()

    @torch.inference_mode()  # as in torch's own groups, which also fill parameters and tensors of an inference mode
    def _take_turn(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._taken:
            self._memory.announce(self._address, self._call)
        try:
            next(self._turns)
        except StopIteration:
            self._is_over = True
            return
        except Exception as error:
            self._error = error
            raise
        self._taken += 1
        self._memory.turns.begin()

    def _refuse_different_calls(self) -> None:
        """Raise `RuntimeError` on all ranks if they called this collective differently."""
        first_of: dict[tuple[str, bool], int] = {}
        for rank, (address, call) in zip(self._memory.ranks, self._memory.announced(), strict=True):
            first_of.setdefault((call, address != ELSEWHERE), rank)
        if len(first_of) > 1:
            some_are_in_place = any(is_in_place for _, is_in_place in first_of)
            calls = ", ".join(
                f"rank {rank} {call}" + " outside of shared memory" * (some_are_in_place and not is_in_place)
                for (call, is_in_place), rank in first_of.items()
            )
            raise RuntimeError(f"the ranks called different collectives: {calls}; all must call the same one")


def call_of(name: str, tensor: Tensor) -> str:
    """Return in words the collective `name` of a tensor, whose size and dtype must be the same on all ranks."""
    size = f"{tensor.numel():,} elements of " if tensor.numel() else ""
    return f"{name} of {size}{tensor.dtype}"
