"""The hosts of the ranks."""

from collections.abc import Sequence

import torch.distributed as dist


class Hosts:
    """The hosts of the ranks, and the store in which the ranks can meet.

    Args:
        of_ranks: the host's name, by rank.
    """

    def __init__(self, of_ranks: Sequence[str], store: dist.Store) -> None:
        self.of_ranks, self.store = of_ranks, store
        self._split: dict[tuple[int, ...], list[list[int]]] = {}  # needed at every sum of tensor parallelism

    def split(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return the ranks on each host, hosts in the order of their first ranks."""
        key = tuple(ranks)
        if key not in self._split:
            names = dict.fromkeys(self.of_ranks[rank] for rank in ranks)
            self._split[key] = [[rank for rank in ranks if self.of_ranks[rank] == name] for name in names]
        return self._split[key]
