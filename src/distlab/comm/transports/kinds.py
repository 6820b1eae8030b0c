"""The kinds of collectives in shared memory, which ranks compare: two kinds in one collective are a program's mistake.

A kind is the dtype of a rank's tensor, and whether the tensor is in memory that the ranks share.
"""

from collections.abc import Sequence

import torch

from distlab.comm.transports.memory import PLACES, SharedMemory

DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
KINDS = 2 * len(DTYPES)


class Kinds:
    """The kinds of a group's last collectives, by rank, in a table of the group's memory.

    Args:
        memory: of the group.
        ranks: of the group, by their numbers in the world.
    """

    def __init__(self, memory: SharedMemory, ranks: Sequence[int]) -> None:
        self._memory, self._ranks = memory, ranks

    def tell(self, number: int, dtype: torch.dtype, is_in_place: bool) -> None:
        """Tell the other ranks of which kind a collective is on this rank, which starts it."""
        if self._memory.kinds:  # made with the first memory
            entry = number * KINDS + 2 * CODES[dtype] + is_in_place
            self._memory.kinds[self._memory.rank][number % PLACES] = entry

    def refuse_two_places(self, number: int) -> None:
        """Raise `RuntimeError` if of the ranks that have started a collective, some are in place and others are not.

        They would wait for each other; whichever starts last finds out.
        """
        if not self._differ(number):
            return
        kinds = self._of(number)
        in_place, elsewhere = ([rank for rank, kind in kinds.items() if kind % 2 == odd] for odd in (1, 0))
        if in_place and elsewhere:
            raise RuntimeError(
                f"rank {in_place[0]} gave a collective a tensor in memory that the ranks share, rank {elsewhere[0]} "
                "one outside of it; let all ranks give one from distlab.comm.group.empty, or none"
            )

    def refuse_two_dtypes(self, number: int) -> None:
        """Raise `RuntimeError` on all ranks if they gave a collective, which all have started, different dtypes."""
        if not self._differ(number):
            return
        first_of = {DTYPES[kind // 2]: rank for rank, kind in reversed(self._of(number).items())}
        if len(first_of) > 1:
            gave = " and ".join(f"rank {rank} one of {dtype}" for dtype, rank in reversed(first_of.items()))
            raise RuntimeError(f"a collective got tensors of different dtypes: {gave}; give it one dtype")

    def _differ(self, number: int) -> bool:
        """Return quickly whether a rank may have started a collective of another kind than this rank."""
        entries = [of_rank[number % PLACES] for of_rank in self._memory.kinds]
        if len(set(entries)) < 2:
            return False
        own = entries[self._memory.rank]
        return any(entry != own and entry // KINDS == number for entry in entries)

    def _of(self, number: int) -> dict[int, int]:
        """Return of which kind a collective is on the ranks that have started it, if they are not far ahead of it."""
        entries = zip(self._ranks, self._memory.kinds, strict=False)  # there are none before the first memory
        last = ((rank, of_rank[number % PLACES]) for rank, of_rank in entries)
        return {rank: entry % KINDS for rank, entry in last if entry // KINDS == number}
