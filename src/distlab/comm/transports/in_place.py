"""Collectives of tensors that lie in the memory that their ranks share."""

from abc import abstractmethod

from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.transports.memory import SharedCollective, SharedMemory
from distlab.comm.transports.sums import CHUNK_BYTES, add_in_order, combine_in_order


class InPlace(SharedCollective):
    """A collective of tensors that lie in each rank's part of the memory; only the result is copied."""

    def __init__(self, memory: SharedMemory, own: Tensor) -> None:
        self._times, self._own = memory.start_in_place(own), own.view(-1)
        super().__init__(memory)

    def _do_share(self, deadline: float) -> None:
        self._memory.ready.wait(self._times, deadline)
        self._combine(self._memory.parts_of(self._times, self._own))
        self._memory.done.send()

    def _wait_for_others(self, deadline: float) -> None:
        self._memory.done.wait(self._times, deadline)

    @abstractmethod
    def _combine(self, parts: list[Tensor]) -> None:
        """Compute this rank's part of the result from the tensors of all ranks, (elements,) each."""


class Reduce(InPlace):
    """A combination of the tensors in the ranks' parts; the first gets the result.

    Each rank combines some of the elements, over the ranks in their order, ((x0 + x1) + x2) + …
    """

    def __init__(self, memory: SharedMemory, own: Tensor, op: ReduceOp.RedOpType) -> None:
        super().__init__(memory, own)
        self._op = op

    def _combine(self, parts: list[Tensor]) -> None:
        memory, elements, item_bytes = self._memory, self._own.numel(), self._own.element_size()
        line = max(1, 64 // item_bytes)  # elements: ranks that wrote to the same cache line would slow each other
        length = -(-elements // (memory.size * line)) * line
        start = min(elements, memory.rank * length)
        in_a_chunk = max(1, CHUNK_BYTES // item_bytes)
        for chunks in zip(*(part[start : start + length].split(in_a_chunk) for part in parts), strict=True):
            result, *others = chunks
            combine_in_order(chunks, self._op, result)
            self._take(result, others)

    def _take(self, result: Tensor, others: list[Tensor]) -> None:
        """Use a chunk of the result, which is in the first part, and the same chunk of the others."""


class AllReduce(Reduce):
    """A combination of the tensors in the ranks' parts; all of them get the result.

    So every rank has the same sums, in every run; the average is the sum divided by the number of ranks.
    """

    def _take(self, result: Tensor, others: list[Tensor]) -> None:
        if self._op == ReduceOp.AVG:
            result.div_(self._memory.size)
        for other in others:
            other.copy_(result)


class Broadcast(InPlace):
    """Every rank copies the tensor in one rank's part, (elements,), into its own part."""

    def __init__(self, memory: SharedMemory, own: Tensor, source: int = 0) -> None:
        super().__init__(memory, own)
        self._source = source

    def _combine(self, parts: list[Tensor]) -> None:
        if self._source != self._memory.rank:
            self._own.copy_(parts[self._source])


class ReduceScatter(InPlace):
    """A sum of which each rank gets a row: rank r adds up row r of the tensors in the parts, (ranks, elements) each.

    It uses `add_in_order` over the ranks.
    """

    def __init__(self, memory: SharedMemory, own: Tensor, total: Tensor) -> None:
        super().__init__(memory, own)
        self._total = total.view(-1)

    def _combine(self, parts: list[Tensor]) -> None:
        size, rank = self._memory.size, self._memory.rank
        add_in_order([part.view(size, -1)[rank] for part in parts], self._total)


class AllGather(InPlace):
    """Every rank copies all ranks' tensors, (elements,) each, into its `rows`, which need not be in its part."""

    def __init__(self, memory: SharedMemory, own: Tensor, rows: Tensor) -> None:
        super().__init__(memory, own)
        self._rows = rows

    def _combine(self, parts: list[Tensor]) -> None:
        for row, part in zip(self._rows, parts, strict=True):
            if row.data_ptr() != part.data_ptr():
                row.copy_(part)
