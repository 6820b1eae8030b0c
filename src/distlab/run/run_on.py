"""`--run-on`: ranks do not wait for each other at the end of a step. A step's loss is checked one step later.

If the loss is not finite, or the gradients had to be clipped, the update is undone. The step is then repeated with the
usual wait, as is the following step, which had started from its weights. (Qi et al., "Zero Bubble Pipeline
Parallelism", arXiv 2401.10241, §4, undo the update by inverting it; restoring a copy is simpler, and exact.)
"""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from distlab.parallel.clipping import NormSum, is_too_long
from distlab.run.loss_sum import LossSum
from distlab.run.state_copy import StateCopy


class Arrived(NamedTuple):
    """A step that turned out to be valid, its loss, and the norm of its gradients if that is limited."""

    step: int
    loss: float
    norm: float | None


class RunningOn:
    """The step whose loss is still unknown.

    Args:
        copy: of the state before its update; taken by the run.
        arrived: called with a step, its loss, and the norm of its gradients if that is limited, once it is known that
            the step is valid: the loss is finite, and the gradients, of a norm of at most `most`, were not clipped.
    """

    def __init__(
        self, copy: StateCopy, arrived: Callable[[int, float, float | None], None], most: float | None = None
    ) -> None:
        self._copy, self._arrived, self._most = copy, arrived, most
        self.last: Arrived | None = None
        self._open: LossSum | None = None
        self._open_norm: NormSum | None = None  # of the same step
        self.waits_in: int | None = None  # the step with the usual wait at its end: repeated, or after a clipped one
        self.must_undo = False

    def leave_open(self, loss: LossSum) -> None:
        """End a step, before its update, without waiting for its loss."""
        self._open = loss
        loss.leave()

    def leave_norm_open(self, norm: NormSum) -> None:
        """Also leave open the norm of the step's gradients, which are used without clipping."""
        self._open_norm = norm
        norm.late.leave()

    def settle(self) -> None:
        """Check the loss of the previous step, if it is still unknown. All ranks call this, with the same result.

        Sets `must_undo` if the loss is not finite or the gradients had to be clipped. Any further check of a
        step belongs here.
        """
        if self._open is None:
            return
        step, loss = self._open.step, self._open.wait()
        norm = None if self._open_norm is None else self._open_norm.wait()
        self._open = self._open_norm = None
        is_clipped = norm is not None and self._most is not None and is_too_long(norm, self._most)
        if math.isfinite(loss) and not is_clipped:
            self._tell(Arrived(step, loss, norm))
        else:
            self.waits_in, self.must_undo = step, True

    @property
    def unsettled(self) -> int | None:
        """The step whose loss is still unknown, or that has to be undone; None if there is no such step."""
        if self.must_undo:
            return self.waits_in
        return None if self._open is None else self._open.step

    def has_waited(self, step: int, norm: float) -> None:
        """Make the next step also wait if this step, which waited, was clipped. Clipped steps come in groups."""
        if self._most is not None and is_too_long(norm, self._most):
            self.waits_in = step + 1

    def undo(self) -> None:
        """Restore the weights and the optimizer's state from the copy."""
        self._copy.restore()
        self.must_undo = False

    def go_on_with(self, step: int, on_others: Iterable[Arrived]) -> None:
        """After a repair, go on with a step, which waits: some ranks may know that it has to, and others not.

        `on_others` are losses that have arrived on other ranks: also that of the step before, if it is unknown here.
        """
        if self.unsettled == step - 1:
            self._tell(next(arrived for arrived in on_others if arrived.step == step - 1))
        self._open = self._open_norm = None
        self.waits_in, self.must_undo = step, False

    def keep_arrived(self) -> None:
        """Record the loss of the open step if it has arrived: for a run that ends early, when no rank may wait."""
        numbers = [number.late for number in (self._open, self._open_norm) if number is not None]
        if self._open is not None and all(number and number.has_arrived() for number in numbers):
            with contextlib.suppress(RuntimeError):  # the transfer failed because another rank has exited
                self.settle()

    def _tell(self, arrived: Arrived) -> None:
        self.last = arrived
        self._arrived(*arrived)
