"""Collectives in memory that the ranks of a host share: their order, and those of tensors that lie in that memory.

A collective is written as a generator, in the turns of `SharedMemory`: at each `yield`, this rank begins a turn, and
the generator continues when all others have begun it too. Those of tensors that lie elsewhere are in slots.py.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.comm.pending import SharedWork
from distlab.comm.transports.memory import Address, SharedMemory
from distlab.comm.transports.sums import CHUNK_BYTES, combine_in_order

DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
KINDS = "all_reduce by", "broadcast from rank", "all_gather", "reduce_scatter", "all_to_all", "all_to_all with sizes"


class SharedCollective(SharedWork):
    """A collective in shared memory; constructing it starts it. They are completed in the order of their starts.

    The thread that calls `wait` does all the work: a second thread would need a core.

    Args:
        kind: one of `KINDS`.
        number: completes the kind: the number of the operation, or of the rank that broadcasts; else 0.
        own: this rank's tensor.
        address: of this tensor, if it lies in shared memory.
        turns: does this rank's part.
        is_even: whether all ranks have as many elements.
    """

    def __init__(
        self,
        memory: SharedMemory,
        kind: str,
        number: int,
        own: Tensor,
        address: Address | None,
        turns: Iterator[None],
        is_even: bool = True,
    ) -> None:
        self._memory, self._turns = memory, turns
        self._call = KINDS.index(kind), number, DTYPES.index(own.dtype), own.numel() * is_even, *(address or (0, 0))
        self._taken = 0  # turns
        self._is_over = False
        self._error: Exception | None = None  # of `turns`, which then has ended
        memory.started += 1
        self._number = memory.started
        memory.not_done.append(self)
        if memory.not_done[0] is self:
            self._take_turn()  # the others need not wait for it later

    @property
    def is_held_back(self) -> bool:
        """True if this rank has yet to compute its part, without which no rank gets the result."""
        return self._number > self._memory.asked_for

    def advance(self, deadline: float) -> None:
        memory = self._memory
        if deadline:  # otherwise this rank may compute for long before it returns here
            memory.asked_for = max(memory.asked_for, self._number)
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
            self._memory.announce(self._call)
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
        first_of: dict[tuple[int, ...], int] = {}
        for rank, (*call, mapping, _) in zip(self._memory.ranks, self._memory.announced(), strict=True):
            first_of.setdefault((*call, mapping > 0), rank)
        if len(first_of) > 1:
            some_in_place = any(is_in_place for *_, is_in_place in first_of)
            calls = ", ".join(f"rank {rank} {_described(call, some_in_place)}" for call, rank in first_of.items())
            raise RuntimeError(f"the ranks called different collectives: {calls}; all must call the same one")


def _described(call: Sequence[int], some_are_in_place: bool) -> str:
    kind, number, dtype, elements, is_in_place = call
    size = f"{elements:,} elements of " if elements else ""
    where = " outside of shared memory" if some_are_in_place and not is_in_place else ""
    completed = ReduceOp.RedOpType(number).name if kind == 0 else number if kind == 1 else ""
    return f"{KINDS[kind]} {completed}".rstrip() + f" of {size}{DTYPES[dtype]}{where}"


def in_place(memory: SharedMemory, own: Tensor, combine: Callable[[list[Tensor]], object]) -> Iterator[None]:
    """Take the turns of a collective of tensors in each rank's part of the memory; only the result is copied.

    Args:
        own: this rank's tensor, which may lie elsewhere in its part than other ranks' tensors.
        combine: compute this rank's part of the result from the tensors of all ranks, (elements,) each.
    """
    like = own.view(-1)
    yield  # all tensors are there
    combine([memory.part(rank, (number, at), like) for rank, (*_, number, at) in enumerate(memory.announced())])
    yield  # all ranks have computed their parts


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
