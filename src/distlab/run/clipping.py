"""A run with `--clip-norm`: when it adds up the loss and the norm; `distlab.parallel.clipping` has the arithmetic.

The ranks wait for the loss and the norm together, and a GPU gets the work for both before the host waits for either.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from distlab.axes.layout import times_counted
from distlab.comm.late import LateNumber
from distlab.comm.names import named
from distlab.parallel import clipping
from distlab.parallel.clipping import NormSum
from distlab.run.state_copy import parameters_of
from distlab.run.steps import NotFiniteError
from distlab.run.training import TrainingRun, TrainSettingsT


class LossSum(LateNumber):
    """The loss of a step's global batch, while it is added up over the ranks.

    `own` is this rank's share, and `counted` the number of times that each micro-batch is in the sum.
    """

    def __init__(self, step: int, own: Tensor, counted: int) -> None:
        self.step, self.own, self._counted = step, own, counted
        total = own.clone()
        with named(f"the loss of step {step}", "loss"):
            super().__init__(total, dist.all_reduce(total, async_op=True))

    def wait(self) -> float:
        """Return the loss, the same number on all ranks."""
        return self.read() / self._counted


class ClippingRun(TrainingRun[TrainSettingsT]):
    """A training run that clips, if its settings ask for that: `log` does not wait for the loss, but `clip` does."""

    sums_exactly = False  # whether a norm is the same bit for bit, however many replicas add it up
    _loss_under_way: LossSum | None = None  # between `log` and `clip` or the update
    _step: int  # the current one

    def track(self, model: Any, optimizer: Optimizer, *further: Any, **options: Any) -> None:
        super().track(model, optimizer, *further, **options)
        # Before an update, if the script does not call `clip`.
        optimizer.register_step_pre_hook(lambda *_: self._print_loss_under_way())

    def steps(self, stories: Any) -> Iterator[tuple[int, Tensor]]:
        for self._step, batch in super().steps(stories):
            yield self._step, batch
            self._print_loss_under_way()  # if the script has neither clipped nor updated the weights

    def sum_loss(self, step: int, losses: Iterable[Tensor]) -> LossSum:
        """Start to add up the loss of the global batch; the arguments are as in `global_loss`."""
        return LossSum(step, self._sum_of(losses), times_counted(self.grid.layout))

    def log(self, step: int, losses: Iterable[Tensor]) -> None:
        """Start to add up the loss of the global batch; `clip` prints it, or the update if the script has no `clip`."""
        if self.settings.clip_norm is None:
            super().log(step, losses)
        elif self._is_reported(step):
            self._loss_under_way = self.sum_loss(step, losses)
            self._loss_under_way.leave()

    def clip(self, optimizer: Optimizer) -> None:
        """Print the loss, and scale the gradients such that their global norm is at most `--clip-norm`.

        Each weight counts once, whichever ranks hold it.

        Raises:
            NotFiniteError: the loss or the norm is infinite or NaN, on all ranks.
        """
        most = self.settings.clip_norm
        if most is None:
            return
        parameters = parameters_of(optimizer)
        under_way = self._sum_norm(parameters)
        under_way.leave()
        self._print_loss_under_way()
        norm = self.records.values["grad_norm"] = under_way.wait()
        if not math.isfinite(norm):
            from distlab.run.not_finite import find_gradient

            cause = find_gradient(self._parts.by_stage(), self.grid)
            raise NotFiniteError(f"the norm of the gradients of step {self._step} is {norm}: {cause}{self._lr_hint}")
        clipping.clip([parameter.grad for parameter in parameters if parameter.grad is not None], norm, most)

    def _sum_norm(self, parameters: Sequence[Tensor]) -> NormSum:
        """Start to add up the global norm of the current step's gradients."""
        what = f"the norm of the gradients of step {self._step}"
        return clipping.sum_norm(parameters, self.grid, what, self.device, self.sums_exactly)

    def _print_loss_under_way(self) -> None:
        """Wait for the loss that `log` has started to add up, if it is not printed yet, and print it."""
        if self._loss_under_way is not None:
            loss, self._loss_under_way = self._loss_under_way, None
            self._print_loss(loss.step, self._checked_loss(loss.step, loss.wait(), loss.own))
