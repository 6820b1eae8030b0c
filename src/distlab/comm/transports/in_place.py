"""Collectives of tensors that lie in the memory that their ranks share."""

from abc import abstractmethod

from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.transports.memory import SharedCollective, SharedMemory
from distlab.comm.transports.sums import CHUNK_BYTES, add_in_order, combine_in_order


class InPlace(SharedCollective):
    """A collective of tensors that lie in each rank's part of the memory; nothing is copied but the result."""

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
        """Compute this rank's share from the parts of all ranks."""


class Reduce(InPlace):
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

    def _combine(self) -> None:
        in_a_chunk = max(1, CHUNK_BYTES // self._share[0].element_size())
        for parts in zip(*(share.split(in_a_chunk) for share in self._share), strict=True):
            result, *others = parts
            combine_in_order(parts, self._op, result)
            self._take(result, others)

    def _take(self, result: Tensor, others: list[Tensor]) -> None:
        """Called for each chunk, with the result, which is in the first part, and the same chunk of the others."""


class AllReduce(Reduce):
    """A combination of what lies at the same place in each rank's part, which all parts get.

    So every rank has the same sums, in every run; the average is the sum divided by the ranks.
    """

    def _take(self, result: Tensor, others: list[Tensor]) -> None:
        if self._op == ReduceOp.AVG:
            result.div_(self._memory.size)
        for other in others:
            other.copy_(result)


class Broadcast(InPlace):
    """Every rank copies what lies in the part of one rank of the group, (elements,), into its own."""

    def __init__(self, memory: SharedMemory, parts: list[Tensor], source: int = 0) -> None:
        self._source, self._own = parts[source], parts[memory.rank]
        super().__init__(memory)

    def _combine(self) -> None:
        if self._own is not self._source:
            self._own.copy_(self._source)


class ReduceScatter(InPlace):
    """A sum of which each rank gets a row: of what is in the parts, (ranks, elements), r's row is added up by rank r.

    The sum is that of `add_in_order` over the ranks.
    """

    def __init__(self, memory: SharedMemory, parts: list[Tensor], own: Tensor) -> None:
        self._rows = [part.view(memory.size, -1)[memory.rank] for part in parts]
        self._own = own.view(-1)
        super().__init__(memory)

    def _combine(self) -> None:
        add_in_order(self._rows, self._own)


class AllGather(InPlace):
    """Every rank copies what the others have: `sources`, (elements,) each, into the rows of `parts`."""

    def __init__(self, memory: SharedMemory, sources: list[Tensor], parts: Tensor) -> None:
        self._sources, self._parts = sources, parts.view(memory.size, -1)
        super().__init__(memory)

    def _combine(self) -> None:
        for row, source in zip(self._parts, self._sources, strict=True):
            if row.data_ptr() != source.data_ptr():
                row.copy_(source)
