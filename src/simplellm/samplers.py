"""The rows of a finite data set for each step: epoch after epoch, in random order."""

import torch
from torch import Tensor

from simplellm.errors import InputError


class BatchSampler:
    """An endless iterator over the row numbers of each step's global batch, int64 of shape (batch,).

    An epoch goes through all rows once, in an order that depends only on the seed and the epoch's number, so every rank
    can compute which rows are its own. An incomplete batch at the end of an epoch is dropped.

    Args:
        rows: number of rows in the data set.
        batch_size: rows per step, over all replicas.
        seed: determines the order.

    Raises:
        InputError: the data set has fewer rows than a batch.
    """

    def __init__(self, rows: int, batch_size: int, seed: int = 0) -> None:
        if rows < batch_size:
            raise InputError(f"the data set has {rows} rows, which do not make a batch of {batch_size}")
        self._rows, self._batch_size, self._seed = rows, batch_size, seed
        self._go_to(epoch=0, offset=0)

    def __iter__(self) -> "BatchSampler":
        return self

    def __next__(self) -> Tensor:
        if self._offset + self._batch_size > self._rows:
            self._go_to(self._epoch + 1, offset=0)
        batch = self._order[self._offset :][: self._batch_size]
        self._offset += self._batch_size
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the position: `offset` rows of epoch number `epoch` have been used.

        It is the same on every rank and does not depend on layout or batch size, so a run may be resumed with others.
        """
        return {"epoch": self._epoch, "offset": self._offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position from `state_dict`.

        Raises:
            InputError: there is no such position in this data.
        """
        if state["offset"] > self._rows:
            raise InputError(f"there is no row {state['offset']} in a data set of {self._rows}")
        self._go_to(state["epoch"], state["offset"])

    def _go_to(self, epoch: int, offset: int) -> None:
        self._epoch, self._offset = epoch, offset
        generator = torch.Generator().manual_seed((self._seed + epoch) % 2**63)
        self._order = torch.randperm(self._rows, generator=generator)
