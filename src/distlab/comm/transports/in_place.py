"""Collectives of tensors that lie in the memory that their ranks share."""

from abc import abstractmethod

from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.transports.memory import SharedCollective, SharedMemory
from distlab.comm.transports.sums import CHUNK_BYTES, add_in_order, combine_in_order


class InPlace(SharedCollective):
    """A collective of tensors that lie in each rank's part of the memory; only the result is copied."""

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__(memory)
        memory.in_place += 1
        self._times = memory.in_place
        memory.ready.send()

    def _do_share(self, deadline: float) -> None:
        self._memory.ready.wait(self._times, deadline)
        self._combine()
        self._memory.done.send()

    def _wait_for_others(self, deadline: float) -> None:
        self._memory.done.wait(self._times, deadline)

    @abstractmethod
    def _combine(self) -> None:
        """Compute this rank's part of the result from the parts of all ranks."""


class Reduce(InPlace):
    """A combination of the tensors at the same place in each rank's part; the first part gets the result.

    Each rank combines some of the elements, over the ranks in their order, ((x0 + x1) + x2) + …
    """

    def __init__(self, memory: SharedMemory, parts: list[Tensor], op: ReduceOp.RedOpType) -> None:
        self._op = op
        elements, item_bytes = parts[0].numel(), parts[0].element_size()
        line = max(1, 64 // item_bytes)  # elements: ranks that wrote to the same cache line would slow each other
        length = -(-elements // (memory.size * line)) * line
        start = min(elements, memory.rank * length)
        self._share = [part[start : start + length] for part in parts]
        super().__init__(memory)

    def _combine(self) -> None:
        in_a_chunk = max(1, CHUNK_BYTES // self._share[0].element_size())
        for parts in zip(*(share.split(in_a_chunk) for share in self._share), strict=True):
            result, *others = parts
            combine_in_order(parts, self._op, result)
            self._take(result, others)

    def _take(self, result: Tensor, others: list[Tensor]) -> None:
        """Use a chunk of the result, which is in the first part, and the same chunk of the others."""


class AllReduce(Reduce):
    """A combination of the tensors at the same place in each rank's part; all parts get the result.

    So every rank has the same sums, in every run; the average is the sum divided by the number of ranks.
    """

    def _take(self, result: Tensor, others: list[Tensor]) -> None:
        if self._op == ReduceOp.AVG:
            result.div_(self._memory.size)
        for other in others:
            other.copy_(result)


class Broadcast(InPlace):
    """Every rank copies the tensor in one rank's part, (elements,), into its own part."""

    def __init__(self, memory: SharedMemory, parts: list[Tensor], source: int = 0) -> None:
        self._source, self._own = parts[source], parts[memory.rank]
        super().__init__(memory)

    def _combine(self) -> None:
        if self._own is not self._source:
            self._own.copy_(self._source)


class ReduceScatter(InPlace):
    """A sum of which each rank gets a row: rank r adds up row r of the tensors in the parts, (ranks, elements) each.

    It uses `add_in_order` over the ranks.
    """

    def __init__(self, memory: SharedMemory, parts: list[Tensor], own: Tensor) -> None:
        self._rows = [part.view(memory.size, -1)[memory.rank] for part in parts]
        self._own = own.view(-1)
        super().__init__(memory)

    def _combine(self) -> None:
        add_in_order(self._rows, self._own)


class AllGather(InPlace):
    """Every rank copies all ranks' `sources`, (elements,) each, into the rows of `parts`."""

    def __init__(self, memory: SharedMemory, sources: list[Tensor], parts: Tensor) -> None:
        self._sources, self._parts = sources, parts.view(memory.size, -1)
        super().__init__(memory)

    def _combine(self) -> None:
        for row, source in zip(self._parts, self._sources, strict=True):
            if row.data_ptr() != source.data_ptr():
                row.copy_(source)
