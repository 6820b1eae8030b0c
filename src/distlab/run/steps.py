"""The steps of a run: each gets its batch, is timed and recorded, and is saved where that is due."""

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from distlab.comm.recorder import STEP
from distlab.run.logs import remove_records_of_the_end
from distlab.run.progress import Progress
from distlab.run.terminal import counted, say
from simplellm.errors import require

if TYPE_CHECKING:
    from distlab.run.checkpointer import Batches
    from distlab.run.run import Run

STOP_AFTER = "LAB_STOP_AFTER"  # environment variable: the number of steps after which a run ends, instead of --steps


class Steps:
    """Loads the checkpoint, if there is one, and iterates over the numbers of a run's steps and their batches.

    Args:
        batches: one for each step; a resumed run continues at the checkpoint's position.
        steps: total number of steps, including the steps before the checkpoint from which the run resumes.
        per_step: size of the global batch, in `unit` ("tokens", "inputs").
        after_step: called with each step's number before it is recorded; its time does not count as step time.

    Raises:
        InputError: the run is to be saved or resumed, but the script has not called `track`.
    """

    def __init__(
        self,
        run: "Run[Any]",
        batches: "Batches[Any]",
        steps: int,
        per_step: int,
        unit: str,
        after_step: Callable[[int], None] = lambda _: None,
    ) -> None:
        count = 0
        if run.checkpointer is not None:
            sentence = "--save-every and --resume need a script that calls run.track before its first step"
            require(run.has_tracked, sentence)
            if run.resumed is not None and not run.joins_late:  # a rank that joins late gets the state from another one
                count = run.checkpointer.load(run.resumed, run._parts, run._optimizer, batches)
        origin = count - run.first_step * per_step
        run.records.begin(per_step, unit, origin, continue_at=run.first_step if run.continues else None)
        steps = int(os.environ.get(STOP_AFTER, steps))
        if run.is_first and run.continues and steps > run.first_step:
            remove_records_of_the_end(run.out)
        self._run, self._batches, self._steps, self._after_step = run, batches, steps, after_step
        self._per_step, self._source = per_step, iter(batches)

        def tell(text: str) -> None:
            if run.has_terminal:
                say(text)

        done = f"; {run.first_step:,} of {steps:,} are done" if run.first_step else ""
        of_each = f" of {counted(per_step, unit)}{' each' * (steps - run.first_step != 1)}"
        tell(f"{counted(steps - run.first_step, 'steps')}{of_each}{done}")
        speed, status = run.records.average_speed, run.terminal.status
        self._progress = Progress(steps, tell, done=run.first_step, speed=speed, status=status)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        step = self._run.first_step
        while step < self._steps:
            yield from self._take(step)
            step = self._finish(step)

    def _finish(self, step: int) -> int:
        """Evaluate, record and save after a step; return the number of the step to take next."""
        self._evaluate(step)
        self._save(step)
        self._progress.advance(step + 1)
        return step + 1

    def _take(self, step: int) -> Iterator[tuple[int, Any]]:
        """Yield a step and its batch, once, and time what the script does with it."""
        run = self._run
        if run.recording is not None:
            run.recording.begin(step)
        batch = self._batch(step)
        with run.records.timing_a_step(), run.recorder.span(STEP, f"step {step}"):
            yield step, batch

    def _batch(self, step: int) -> Any:
        return next(self._source)

    def _evaluate(self, step: int) -> None:
        self._after_step(step)
        self._run.records.record(step)

    def _save(self, step: int) -> None:
        """Save a checkpoint after a step, where that is due."""
        run = self._run
        if run.checkpointer is not None and run.checkpointer.is_due(step, self._steps):
            with run.records.timing_apart("checkpoints", f"saving after {counted(step + 1, 'steps')}"):
                run.checkpointer.save(step + 1, run._parts, run._optimizer, self._position(step + 1), run.records)

    def _position(self, step: int) -> dict[str, int]:
        """Return the position in the data before the batch of a step, the next one."""
        return self._batches.state_dict()


class NotFiniteError(RuntimeError):
    """A loss, or a norm of gradients, is infinite or NaN; all ranks raise this, with the same words."""
