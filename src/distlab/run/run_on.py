"""`--run-on`: ranks do not wait for each other at the end of a step. A step's loss is checked one step later.

If the loss is not finite, or the gradients had to be clipped, the update is undone. The step is then repeated with the
usual wait, as is the following step, which had started from its weights. (Qi et al., "Zero Bubble Pipeline
Parallelism", arXiv 2401.10241, §4, undo the update by inverting it; restoring a copy is simpler, and exact.)
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from distlab.parallel.clipping import NormSum, is_too_long
from distlab.reports import METRICS
from distlab.reports.records import keep_records, read_steps
from distlab.run.clipping import ClippingRun, LossSum
from distlab.run.logs import RunLog
from distlab.run.state_copy import StateCopy, parameters_of
from distlab.run.steps import Steps
from distlab.run.training import TrainSettingsT
from simplellm.errors import require


class Arrived(NamedTuple):
    """A step that turned out to be valid, and the values of its record that have arrived: loss, perhaps grad_norm."""

    step: int
    values: dict[str, float]


class RunningOn:
    """The step whose loss is still unknown.

    Args:
        copy: of the state before its update; taken by the run.
        arrived: called once it is known that a step is valid: the loss is finite, and the gradients, of a norm of at
            most `most`, were not clipped.
    """

    def __init__(self, copy: StateCopy, arrived: Callable[[Arrived], None], most: float | None = None) -> None:
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
        norm.leave()

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
            self._tell(Arrived(step, {"loss": loss} | ({} if norm is None else {"grad_norm": norm})))
        else:
            self.waits_in, self.must_undo = step, True

    @property
    def unsettled(self) -> int | None:
        """The step whose loss is still unknown, or that has to be undone; None if there is no such step."""
        if self.must_undo:
            return self.waits_in
        return None if self._open is None else self._open.step

    def is_open(self, step: int) -> bool:
        """Return whether a step ended without its loss, which is still unknown."""
        return self._open is not None and self._open.step == step

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
        is_unknown = self.unsettled == step - 1
        self._open = self._open_norm = None
        self.waits_in, self.must_undo = step, False
        if is_unknown:
            self._tell(next(arrived for arrived in on_others if arrived.step == step - 1))

    def keep_arrived(self) -> None:
        """Record the loss of the open step if it has arrived: for a run that ends early, when no rank may wait."""
        if all(number is None or number.has_arrived() for number in (self._open, self._open_norm)):
            with contextlib.suppress(RuntimeError):  # the transfer failed because another rank has exited
                self.settle()

    def _tell(self, arrived: Arrived) -> None:
        self.last = arrived
        self._arrived(arrived)


class UndoableLog(RunLog):
    """Records that may be dropped again, that may get their loss later, and that another rank may go on writing."""

    late: RunningOn | None = None
    _open: dict[str, Any] | None = None  # the record of the last step, until its loss arrives
    _recent: Sequence[dict[str, Any]] = ()  # the last two that are complete

    def arrived(self, values: dict[str, float]) -> None:
        """Complete the record of the last step, at least by its loss."""
        if self._open is not None:
            self._write({**self._open, **values})
            self._open = None

    def take_back(self, steps: int) -> None:
        """Drop the last steps, which will be repeated."""
        if not steps:
            return
        self.seconds_apart["steps that were taken again"] += sum(step.seconds for step in self.times[-steps:])
        del self.times[-steps:]
        self._open = None

    def continue_at(self, step: int, writes: bool) -> None:
        """Drop the records from `step` on. `writes`: this rank writes the following ones."""
        self._recent = [record for record in self._recent if record["step"] < step]
        self._writes = writes
        if writes:
            if self._metrics is not None:
                self._metrics.close()
            path = self._out / METRICS
            keep_records(path, before=step)
            last = max((record["step"] for record in read_steps(self._out, "step")), default=-1)
            self._metrics = path.open("a")
            for record in self._recent:  # those that the rank before this one has not written
                if record["step"] > last:
                    super()._write(record)

    def has(self, step: int) -> bool:
        return bool(self._recent) and bool(self._recent[-1]["step"] == step)

    def record(self, step: int) -> None:
        if self.has(step) or not self.times:  # the second: this rank has just taken the place of another
            return
        last = None if self.late is None else self.late.last
        if last is not None and last.step == step:  # it has arrived already, in a repair
            self.values |= last.values
        super().record(step)

    def _write(self, record: dict[str, Any]) -> None:
        if self.late is not None and self.late.is_open(record["step"]):
            self._open = record
        else:
            self._recent = [*self._recent, record][-2:]
            super()._write(record)


class UndoableSteps(Steps):
    """Steps of which the last one, and the one before it, may be taken again, with the same batches."""

    _run: "UndoableRun[Any]"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._taken: dict[int, tuple[dict[str, int], Any]] = {}  # by step, the last batches, and where each begins

    def _finish(self, step: int) -> int:
        return step - 1 if self._has_undone() else super()._finish(step)

    def _batch(self, step: int) -> Any:
        if step not in self._taken:
            self._taken[step] = super()._position(step), super()._batch(step)
        return self._taken[step][1]

    def _position(self, step: int) -> dict[str, int]:
        return self._taken[step][0] if step in self._taken else super()._position(step)

    def _has_undone(self) -> bool:
        """Undo the step before, and the current one, if the step before was not valid."""
        if not self._run.late.must_undo:
            return False
        self._run.late.undo()
        self._run.records.take_back(2)
        return True

    def _evaluate(self, step: int) -> None:
        self._taken.pop(step - 1, None)
        super()._evaluate(step)


class UndoableRun(ClippingRun[TrainSettingsT]):
    """A training run that keeps a copy of the state before the last update.

    With `--run-on`, `log` and `clip` do not wait for the loss and the norm of a step, which the next step checks.
    """

    kind_of_steps = UndoableSteps
    kind_of_log = UndoableLog
    records: UndoableLog
    copy: StateCopy
    late: RunningOn

    def track(self, model: Any, optimizer: Optimizer, *further: Any, **options: Any) -> None:
        super().track(model, optimizer, *further, **options)
        copy = self.copy = StateCopy(optimizer, self._parts.changing_shards)
        if self.memory is not None:
            self.memory.copied_bytes = copy.size_bytes
        self.late = self.records.late = RunningOn(copy, self._loss_arrived, self.settings.clip_norm)
        self.steps_overlap = getattr(self.settings, "run_on", False)

    def steps(self, stories: Any) -> Iterator[tuple[int, Tensor]]:
        sentence = "--run-on and --repair need a script that calls run.track before its first step"
        require(self.has_tracked, sentence)
        return super().steps(stories)

    def log(self, step: int, losses: Iterable[Tensor]) -> None:
        """Print the loss of the global batch; with `--run-on` a step later, where it may undo this step."""
        late = self.late
        late.settle()  # as long as that may fail, the copy is one of the state before
        if late.must_undo:
            return
        self.copy.take()
        if not self.steps_overlap or late.waits_in == step or self._needs_loss(step):
            super().log(step, losses)
        else:
            late.leave_open(self.sum_loss(step, losses))

    def clip(self, optimizer: Optimizer) -> None:
        """With `--clip-norm`, scale the gradients of a step.

        With `--run-on`, ranks do not wait for the norm, and use the gradients as they are; if they should have been
        scaled, the step is taken again.
        """
        late = self.late
        if late.is_open(self._step):
            if self.settings.clip_norm is not None:
                late.leave_norm_open(self._sum_norm(parameters_of(optimizer)))
        elif not late.must_undo:
            super().clip(optimizer)
            late.has_waited(self._step, self.records.values.get("grad_norm", 0.0))

    def _loss_arrived(self, arrived: Arrived) -> None:
        """Print and record the loss of a step that did not wait for it, and the norm of its gradients."""
        self._print_loss(arrived.step, arrived.values["loss"])
        self.records.arrived(arrived.values)

    def end_early(self, error: BaseException) -> None:
        if self.records.late is not None:
            self.records.late.keep_arrived()
        super().end_early(error)
