"""Collectives in memory that the ranks of a host share: their order, and those of tensors that lie in that memory.

Those of tensors that lie elsewhere are in slots.py.
"""

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.pending import SharedWork
from distlab.comm.transports.memory import PLACES, Address, SharedMemory
from distlab.comm.transports.sums import CHUNK_BYTES, COMBINE, combine_in_order

DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
OPERATIONS = [
    *("all_gather", "reduce_scatter", "all_to_all", "all_to_all with sizes"),
    *(f"all_reduce by {op.name}" for op in (*COMBINE, ReduceOp.AVG)),
    *(f"broadcast from rank {rank}" for rank in range(1000)),  # those of more ranks have the first code
]
CODE_OF_DTYPE = {dtype: code for code, dtype in enumerate(DTYPES)}
CODE_OF_OPERATION = {operation: code for code, operation in enumerate(OPERATIONS)}
NUMBERS, CODES, SIZES = 2 * PLACES, 1 << 18, 1 << 32  # in the 63 bits of a call


class Call(NamedTuple):
    """How a rank calls a collective; all ranks have to call it in the same way."""

    operation: str
    dtype: torch.dtype
    elements: int  # of its tensor, if all ranks have as many

    def __str__(self) -> str:
        elements = f"{self.elements:,} elements of " if self.elements else ""
        return f"{self.operation} of {elements}{self.dtype}"

    def packed(self, number: int) -> int:
        """Return the call, of this number, as an integer of 63 bits; of a larger tensor, the lower bits of its size."""
        code = CODE_OF_OPERATION.get(self.operation, 0) * len(DTYPES) + CODE_OF_DTYPE[self.dtype]
        return (number % NUMBERS * CODES + code) * SIZES + self.elements % SIZES


def unpacked(packed: int) -> tuple[int, Call]:
    """Return the number, modulo `NUMBERS`, and the call that `Call.packed` has made an integer of."""
    rest, elements = divmod(packed, SIZES)
    number, code = divmod(rest, CODES)
    operation, dtype = divmod(code, len(DTYPES))
    return number, Call(OPERATIONS[operation], DTYPES[dtype], elements)


class Collectives:
    """The collectives of a group in shared memory, which are completed in the order in which they started.

    Args:
        memory: of the group.
        ranks: of the group, by their numbers in the world.
    """

    def __init__(self, memory: SharedMemory, ranks: Sequence[int]) -> None:
        self.memory, self._ranks = memory, ranks
        self.begun = 0
        self.asked_for = 0  # this rank has computed its part up to this one, or is about to
        self.not_done: deque[SharedCollective] = deque()  # this rank's part is not done

    def begin(self, call: Call) -> int:
        """Start a collective, and return its number; tell the other ranks how this rank calls it."""
        self.begun += 1
        self.memory.calls[self.memory.rank][self.begun % PLACES] = call.packed(self.begun)
        return self.begun

    def refuse_different_calls(self, number: int) -> None:
        """Raise `RuntimeError` on all ranks if they called a collective, which all have started, differently."""
        entries = [of_rank[number % PLACES] for of_rank in self.memory.calls]
        if len(set(entries)) == 1:
            return
        first_of: dict[Call, int] = {}
        for rank, entry in zip(self._ranks, entries, strict=True):
            of_number, call = unpacked(entry)
            if of_number == number % NUMBERS:  # otherwise the rank is far ahead
                first_of.setdefault(call, rank)
        if len(first_of) > 1:
            calls = ", ".join(f"rank {rank} {call}" for call, rank in first_of.items())
            raise RuntimeError(f"the ranks called different collectives: {calls}; all must call the same one")

    def make_room(self, timeout_seconds: float) -> None:
        """Wait for the first collective if `PLACES` are under way; if they are in place, until all are done with it."""
        memory = self.memory
        oldest = memory.ready.sent + 1 - PLACES
        if memory.done.received < oldest or len(self.not_done) == PLACES:
            deadline = time.perf_counter() + timeout_seconds
            while memory.done.sent < oldest or len(self.not_done) == PLACES:
                self.not_done[0].advance(deadline)
            memory.done.wait(oldest, deadline)


class SharedCollective(SharedWork):
    """A collective in shared memory; constructing it starts it.

    The thread that calls `wait` does all the work: a second thread would need a core.
    """

    def __init__(self, collectives: Collectives, call: Call) -> None:
        self._collectives, self._memory = collectives, collectives.memory
        self._number = collectives.begin(call)
        collectives.not_done.append(self)

    @property
    def is_held_back(self) -> bool:
        """True if this rank has yet to compute its part, without which no rank gets the result."""
        return self._number > self._collectives.asked_for

    @torch.inference_mode()  # as in torch's own groups, which also fill parameters and tensors of an inference mode
    def advance(self, deadline: float) -> None:
        them = self._collectives
        if deadline:  # otherwise this rank may compute for long before it returns here
            them.asked_for = max(them.asked_for, self._number)
        while them.not_done and them.not_done[0]._number <= self._number:
            first = them.not_done[0]
            first._do_share(deadline)
            them.not_done.popleft()
        self._wait_for_others(deadline)

    @abstractmethod
    def _do_share(self, deadline: float) -> None:
        """Wait for the others' parts, and compute this rank's part; after a timeout, the rest of it."""

    def _wait_for_others(self, deadline: float) -> None:
        """Wait until the other ranks have computed their parts, if this rank needs them."""


class InPlace(SharedCollective):
    """A collective of tensors that lie in each rank's part of the memory; only the result is copied.

    Args:
        address: of this rank's tensor, which may lie elsewhere in its part than other ranks' tensors.
        own: this rank's tensor.
        combine: compute this rank's part of the result from the tensors of all ranks, (elements,) each.
        operation: one of `OPERATIONS`.
    """

    def __init__(
        self,
        collectives: Collectives,
        address: Address,
        own: Tensor,
        combine: Callable[[list[Tensor]], object],
        operation: str,
    ) -> None:
        super().__init__(collectives, Call(operation, own.dtype, own.numel()))
        self._own, self._combine = own.view(-1), combine
        memory = self._memory
        self._times = memory.ready.sent + 1  # of both signals, until it is done
        self._at = 2 * (self._times % PLACES)
        memory.addresses[memory.rank][self._at], memory.addresses[memory.rank][self._at + 1] = address
        memory.ready.send()

    def _do_share(self, deadline: float) -> None:
        memory = self._memory
        memory.ready.wait(self._times, deadline)
        self._collectives.refuse_different_calls(self._number)
        addresses = [(of_rank[self._at], of_rank[self._at + 1]) for of_rank in memory.addresses]
        self._combine([memory.part(rank, address, self._own) for rank, address in enumerate(addresses)])
        memory.done.send()

    def _wait_for_others(self, deadline: float) -> None:
        self._memory.done.wait(self._times, deadline)


def combine_share(parts: Sequence[Tensor], rank: int, op: ReduceOp.RedOpType, *, all_get_it: bool = True) -> None:
    """Combine a rank's share of the elements, over the ranks in their order, ((x0 + x1) + x2) + …

    So every rank has the same sums, in every run; the average is the sum divided by the number of ranks.

    Args:
        parts: all ranks' tensors, (elements,) each.
        all_get_it: whether all of them get the result, or only the first.
    """
    elements, item_bytes = parts[0].numel(), parts[0].element_size()
    line = max(1, 64 // item_bytes)  # elements: ranks that wrote to the same cache line would slow each other
    length = -(-elements // (len(parts) * line)) * line
    start = min(elements, rank * length)
    in_a_chunk = max(1, CHUNK_BYTES // item_bytes)
    for chunks in zip(*(part[start : start + length].split(in_a_chunk) for part in parts), strict=True):
        result, *others = chunks
        combine_in_order(chunks, op, result)
        if op == ReduceOp.AVG:
            result.div_(len(parts))
        for other in others if all_get_it else ():
            other.copy_(result)
