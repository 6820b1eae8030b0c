"""One stage of the model, as the actions that run on it see it."""

import contextlib
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from distlab.pipeline.activations import SavedActivations

Loss = Callable[[Tensor, Tensor], Tensor]


class Stage:
    """Its module, and what its actions keep of each micro-batch for later ones."""

    def __init__(self, net: nn.Module, loss: Loss | None, kept: SavedActivations | None) -> None:
        self.net, self._loss, self._kept = net, loss, kept
        self.micro_batches: Sequence[Tensor] = ()  # of the step: token ids, each (batch, seq)
        self.shares: Sequence[float] = ()  # of the step: each micro-batch's fraction of all targets
        self.losses: dict[int, Tensor] = {}  # on the last stage, by micro-batch: its share of the mean loss
        self.live: dict[int, tuple[Tensor, ...]] = {}  # by micro-batch: what its actions keep for later actions
        self._holds: dict[int, object] = {}  # by micro-batch: has the output counted as kept

    def forward(self, micro_batch: int, x: Tensor) -> Tensor:
        """The stage's output for x; on the last stage, the micro-batch's share of the loss."""
        with self._kept.counting() if self._kept else contextlib.nullcontext():
            y: Tensor = self.net(x)
            if self._loss is not None:
                y = self._loss(y, self.micro_batches[micro_batch]) * self.shares[micro_batch]
                self.losses[micro_batch] = y.detach()
        if self._kept and y.requires_grad:
            self._holds[micro_batch] = self._kept.keep(y)
        return y

    def release(self, micro_batch: int) -> tuple[Tensor, ...]:
        """Remove and return what is kept of a micro-batch."""
        self._holds.pop(micro_batch, None)
        return self.live.pop(micro_batch)
