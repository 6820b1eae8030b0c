"""Collectives in memory that the ranks of a host share: their order, and those of tensors that lie in that memory.

Those of tensors that lie elsewhere are in slots.py.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.pending import SharedWork
from distlab.comm.transports.memory import Place, SharedMemory
from distlab.comm.transports.sums import CHUNK_BYTES, add_in_order, combine_in_order


class SharedCollective(SharedWork):
    """A collective in shared memory; constructing it starts it.

    The thread that calls `wait` does all the work: a second thread would need a core. The collectives of a group are
    completed in the order in which they started.
    """

    def __init__(self, memory: SharedMemory, place: Place | None) -> None:
        self._memory = memory
        self._number = memory.begin(place)
        memory.not_done.append(self)

    @property
    def is_held_back(self) -> bool:
        """True if this rank has yet to compute its part, without which no rank gets the result."""
        return self._number > self._memory.asked_for

    def advance(self, deadline: float) -> None:
        memory = self._memory
        if deadline:  # otherwise this rank may compute for long before it returns here
            memory.asked_for = max(memory.asked_for, self._number)
        while memory.not_done and memory.not_done[0]._number <= self._number:
            first = memory.not_done[0]
            memory.refuse_two_kinds(first._number)
            first._do_share(deadline)
            memory.not_done.popleft()
        self._wait_for_others(deadline)

    @abstractmethod
    def _do_share(self, deadline: float) -> None:
        """Wait for the others' parts, and compute this rank's part; after a timeout, the rest of it."""

    def _wait_for_others(self, deadline: float) -> None:
        """Wait until the other ranks have computed their parts, if this rank needs them."""


class InPlace(SharedCollective):
    """A collective of tensors that lie in each rank's part of the memory; only the result is copied.

    Args:
        place: where this rank's tensor lies, which may be at another place in its part than other ranks' tensors.
        own: this rank's tensor.
        combine: compute this rank's part of the result from the tensors of all ranks, (elements,) each.
    """

    def __init__(
        self, memory: SharedMemory, place: Place, own: Tensor, combine: Callable[[list[Tensor]], object]
    ) -> None:
        super().__init__(memory, place)
        self._own, self._combine = own.view(-1), combine
        self._times = memory.ready.sent

    def _do_share(self, deadline: float) -> None:
        memory = self._memory
        memory.ready.wait(self._times, deadline)
        self._combine(memory.parts_of(self._times, self._own))
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


def copy_from(parts: Sequence[Tensor], source: int, rank: int) -> None:
    """Copy the source's tensor into this rank's."""
    if source != rank:
        parts[rank].copy_(parts[source])


def add_row(parts: Sequence[Tensor], row: int, total: Tensor) -> None:
    """Add up a row of all ranks' tensors, (ranks, elements) each, over the ranks in their order (`add_in_order`)."""
    add_in_order([part.view(len(parts), -1)[row] for part in parts], total.view(-1))


def copy_all(parts: Sequence[Tensor], rows: Tensor) -> None:
    """Copy all ranks' tensors, (elements,) each, into `rows`, some of which may be these tensors."""
    for row, part in zip(rows, parts, strict=True):
        if row.data_ptr() != part.data_ptr():
            row.copy_(part)
