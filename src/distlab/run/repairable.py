"""The run and its steps with `--repair`, which call `distlab.run.repair` when a rank dies.

The steps are divided into phases, each of which may fail when a rank dies and is then done again.
"""

import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch.optim import Optimizer

from distlab.axes.layout import layout_size
from distlab.machine.devices import cores
from distlab.machine.processes import NEWCOMER
from distlab.rendezvous import ranks, survivors
from distlab.rendezvous.survivors import KEEP, MEET, TAKE, NewsError, Position
from distlab.reports.records import read_steps
from distlab.run.joining import join_late
from distlab.run.repair import Repair
from distlab.run.run_on import Arrived, UndoableRun, UndoableSteps
from distlab.run.starting import Joined
from distlab.run.terminal import counted, say
from distlab.settings.common import RunSettings
from distlab.settings.folders import Claim
from distlab.settings.replicas import RepairFlag
from simplellm.errors import require

STEPS_TO_MEASURE = 5
RepairFlagT = TypeVar("RepairFlagT", bound=RepairFlag)


def await_place(settings: RunSettings) -> None:
    """As a spare, wait for a death; what does not depend on the place is loaded before."""
    survivors.await_place(ranks.open_store(-1, settings.master_addr, 0, settings.timeout))


class RepairableSteps(UndoableSteps):
    """Steps from which ranks can be taken back, as `repair` demands; after the last one, they wait for each other."""

    _run: "RepairableRun[Any]"
    _repair: Repair
    _alive: Sequence[int]  # since the last repair
    _usual_seconds: float | None = None  # of a step of all ranks, before a death
    _to_measure = 0  # steps until a step is long enough after a repair

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        run, repair = self._run, self._run.repair
        self._begin()
        while repair.position.step < self._steps:
            step, phase = repair.position
            timed = step + 1  # the number of steps that have records
            if phase == TAKE:
                with run.surviving():
                    repair.survivor.check()
                if repair.goes_back:
                    timed = step
                else:
                    yield from self._take(step)
                is_undone = not repair.goes_back and self._has_undone()
                following = Position(step - 1, TAKE) if is_undone else Position(step, KEEP)
            elif phase == KEEP:
                with run.surviving():
                    if (step + 1) % run.settings.compare_every == 0:
                        repair.compare()
                    self._evaluate(step)
                    self._save(step)
                if not repair.goes_back:
                    self._progress.advance(step + 1)
                    self._measure()
                following = Position(step, MEET) if step + 1 == self._steps else Position(step + 1, TAKE)
            else:  # from then on no rank can be taken back to a step
                with run.surviving():
                    run.meet()
                following = Position(step + 1, TAKE)
            if repair.goes_back:
                self._go_back(timed)
            else:
                repair.position = following

    def _begin(self) -> None:
        self._repair = self._run.repair
        self._repair.survivor.begin()
        self._repair.describe = self._state_at
        if self._run.joins_late:
            self._take_place()
        self._alive = self._run.grid.alive

    def _state_at(self, at: Position) -> dict[str, Any]:
        """Return the record that a newcomer gets beside the weights."""
        return {"data": self._position(at.step), "origin": self._run.records.origin}

    def _take_place(self) -> None:
        """As a newcomer, get the state of the rank whose place this one takes."""
        run, repair = self._run, self._repair
        with run.surviving():
            raise NewsError
        assert repair.received is not None
        self._batches.load_state_dict(repair.received["data"])
        self._source = iter(self._batches)
        run.records.origin, run.first_step = repair.received["origin"], repair.position.updates
        repair.goes_back = False
        if repair.position.phase != TAKE:
            self._batch(repair.position.step)

    def _go_back(self, timed: int) -> None:
        """After a repair, drop the records of what is done again from its position on."""
        at, self._repair.goes_back = self._repair.position, False
        self._repair.drop_abandoned_groups()
        self._run.records.take_back(timed - at.updates)
        if len(self._alive) == layout_size(self._run.settings.layout) and self._to_measure <= 0:
            self._usual_seconds = self._usual_seconds or self._seconds()
        self._alive = self._run.grid.alive
        self._to_measure = STEPS_TO_MEASURE + 1  # the first one also sets up connections
        self._run.records.continue_at(at.updates, self._run.is_first)

    def _seconds(self) -> float | None:
        """Return the median time of the last steps; None if there are too few."""
        times = [step.seconds for step in self._run.records.times[-STEPS_TO_MEASURE:]]
        return statistics.median(times) if len(times) == STEPS_TO_MEASURE else None

    def _measure(self) -> None:
        """Some steps after a repair, say how long a step takes now, beside the plan."""
        self._to_measure -= 1
        now, usual = self._seconds(), self._usual_seconds
        if self._to_measure or now is None or usual is None or not self._run.is_first:
            return
        here, planned = counted(cores(), "cores"), self._run.settings.slowdown(self._alive, cores())
        times = f"{now / usual:.2f} times as long, {planned:.2f} by the plan for {here}"
        say(f"a step now takes {now:.3g} s instead of {usual:.3g} s: {times}")

    def _save(self, step: int) -> None:
        """Save a checkpoint after a step, where that is due, unless the ranks had saved it before a repair."""
        checkpointer = self._run.checkpointer
        if checkpointer is None or not checkpointer.is_due(step, self._steps):
            return
        if self._run.is_first:
            checkpointer.discard_unfinished(step + 1)
        self._run.meet(f"the deletion of an unfinished checkpoint of step {step + 1}")
        if checkpointer.has(step + 1):
            checkpointer.saved = step + 1
        else:
            super()._save(step)


class RepairableRun(UndoableRun[RepairFlagT]):
    """A training run that goes on when a rank dies."""

    kind_of_steps = RepairableSteps
    _printed: tuple[int, float] | None = None  # the last step with a loss, and its loss

    def __init__(self, settings: RepairFlagT, script: Path) -> None:
        self.joins_late = NEWCOMER in os.environ  # in the place of a rank that has died
        super().__init__(settings, script)
        self.sums_exactly = settings.repair == "exact"
        self.repair = Repair(self.joined, settings.timeout, self.first_step)

    @property
    def shared_cores(self) -> int | None:
        return None if self.sums_exactly else super().shared_cores  # other numbers of threads round in other ways

    def _join(self, script: Path) -> Joined:
        is_watched = "LAB_LAUNCHER" in os.environ
        require(is_watched, "--repair: only launch.sh notices deaths; start the ranks with it, or with --repair off")
        return join_late(self.settings, script) if self.joins_late else super()._join(script)

    def track(self, model: Any, optimizer: Optimizer, *further: Any, **options: Any) -> None:
        super().track(model, optimizer, *further, **options)
        self.repair.copy, self.repair.late = self.copy, self.late
        assert self.memory is not None
        self.memory.gradient_sums = self.settings.gradient_sums

    @contextlib.contextmanager
    def surviving(self) -> Iterator[Sequence[int]]:
        """If a rank dies while the code inside runs, repair the run; then the code has to run again.

        Inside `steps`, the step begins again by itself. Yields the ranks that are left, by their original numbers: the
        same object as before, unless the groups have been made again. Among each other, the ranks have new numbers:
        those of torch.distributed.
        """
        try:
            yield self.grid.alive
        except Exception as error:
            self._take_over(*self.repair.after(error))

    def _take_over(self, sentence: str, arrived: Sequence[Arrived]) -> None:
        """After a repair, become the rank that prints and writes, if that one has died."""
        updates = self.repair.position.updates
        self._loss_under_way = None  # the step is taken again
        self.late.go_on_with(updates, arrived)
        self.context = self.joined.context
        takes_over = not self.is_first and self.grid.rank == 0
        if takes_over:
            self.is_first = self.has_terminal = True
            self.terminal.out.prefix = self.terminal.err.prefix = ""
            self.joined.claim = Claim(self.out)
        if self.is_first:
            say(sentence)
        if takes_over and self.steps_overlap and self._printed:
            step, recorded = self._printed[0], [record["step"] for record in read_steps(self.out, "step")]
            if step < updates and step not in recorded:  # the rank before it has not got to it
                self._print_loss(*self._printed)
        if self.validator is not None:
            self.validator.divide(self.grid.rank, self.grid.size)

    def _print_loss(self, step: int, loss: float) -> None:
        self._printed = step, loss
        super()._print_loss(step, loss)

    def _end_together(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        while True:
            with self.surviving():
                if self.repair.position.phase == MEET:  # another rank has yet to reach the end
                    self.meet()
                return super()._end_together()

    def _keep_ledger(self, accounts: Sequence[dict[str, Any]]) -> None:
        if not self.repair.survivor.epoch:  # a repair numbers the ranks again
            super()._keep_ledger(accounts)
