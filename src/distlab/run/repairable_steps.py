"""`--repair`: the steps of a run in phases, each of which may fail when a rank dies and is then done again."""

import gc
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from distlab.axes.layout import layout_size
from distlab.machine.devices import cores
from distlab.rendezvous.survivors import EVALUATE, MEET, SAVE, TAKE, NewsError, Position
from distlab.run.steps import Steps
from distlab.run.terminal import counted, say
from distlab.settings.replicas import RepairFlag

if TYPE_CHECKING:
    from distlab.run.repair import Repair

STEPS_TO_MEASURE = 5
BatchT = TypeVar("BatchT")


class RepairableSteps(Steps[BatchT]):
    """Steps from which ranks can be taken back, as `repair` demands; after the last one, they wait for each other."""

    has_position = True

    _repair: "Repair"
    _alive: tuple[int, ...]  # since the last repair
    _origin: int  # `records.count` before step 0
    _usual_seconds: float | None = None  # of a step of all ranks, before a death
    _to_measure = 0  # steps until a step is long enough after a repair

    def __iter__(self) -> Iterator[tuple[int, BatchT]]:
        step, phase, is_again = *self._begin(), False
        run, repair = self._run, self._repair
        while step < self._steps:
            repair.reach(step, phase)
            timed = step + 1  # the number of steps that have records
            if phase == TAKE:
                with run.surviving():
                    repair.survivor.check()
                if repair.done is None:
                    yield from self._take(step)
                else:
                    timed = step
                is_undone = repair.done is None and self._has_undone()
                following = Position(step - 1, TAKE) if is_undone else Position(step, EVALUATE)
            elif phase == EVALUATE:
                with run.surviving():
                    if (step + 1) % getattr(run.settings, "compare_every", 1) == 0:
                        repair.compare()
                    self._evaluate(step)
                following = Position(step, SAVE)
            elif phase == SAVE:
                with run.surviving():
                    if not (is_again and self._is_saved(step)):
                        self._save(step)
                if repair.done is None:
                    self._progress.advance()
                    self._measure()
                following = Position(step, MEET) if step + 1 == self._steps else Position(step + 1, TAKE)
            else:  # from then on no rank can be taken back to a step
                with run.surviving():
                    run.meet()
                following = Position(step + 1, TAKE)
            is_again = repair.done is not None
            step, phase = self._go_back(step, phase, timed) if is_again else following
        repair.reach(self._steps, TAKE)

    def _begin(self) -> Position:
        run = self._run
        assert run.repair is not None
        self._repair, self._alive = run.repair, run.repair.alive
        self._origin = run.records.count - run.first_step * self._per_step
        self._repair.survivor.begin()
        if self._repair.state is not None:
            self._repair.state.describe = self._state_at
        if not self._repair.is_newcomer:
            return Position(self._run.first_step, TAKE)
        at = self._take_place()
        if at.phase != TAKE:
            self._taken[at.step] = self._next()
        return at

    def _state_at(self, at: Position) -> dict[str, Any]:
        """Return the record that a newcomer gets beside the weights."""
        position = self._taken[at.step].before if at.step in self._taken else self._position()
        return {"data": position, "count": self._origin + at.updates * self._per_step}

    def _take_place(self) -> Position:
        """As a newcomer, get the state of the rank whose place this one takes; return where the ranks go on."""
        run, repair = self._run, self._repair
        with run.surviving():
            raise NewsError
        assert repair.received is not None
        assert repair.done is not None
        at, repair.done, self._alive = repair.done.position, None, repair.alive
        self._batches.load_state_dict(repair.received["data"])
        self._source = iter(self._batches)
        run.records.count, run.first_step = repair.received["count"], at.step
        self._origin = run.records.count - at.updates * self._per_step
        run.records.continue_at(at.step + (at.phase > EVALUATE), run.is_first)
        return at

    def _go_back(self, step: int, phase: int, timed: int) -> Position:
        """Return the position from which the ranks go on after a repair, and drop the records of what is done again."""
        assert self._repair.done is not None
        at, self._repair.done = self._repair.done.position, None
        gc.collect()  # the earlier groups, with their threads, connections and memory
        self._run.records.take_back(timed - at.updates)
        if len(self._alive) == layout_size(self._run.settings.layout) and self._to_measure <= 0:
            self._usual_seconds = self._usual_seconds or self._seconds()
        self._alive = self._repair.alive
        self._to_measure = STEPS_TO_MEASURE + 1  # the first one also sets up connections
        for _ in range(at.step + (at.phase == MEET), step + (phase == MEET)):
            self._progress.take_back()
        self._run.records.continue_at(at.step + (at.phase > EVALUATE), self._run.is_first)
        return at

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
        settings, here = self._run.settings, counted(cores(), "cores")
        assert isinstance(settings, RepairFlag)
        planned = settings.slowdown(self._repair.alive, cores())
        times = f"{now / usual:.2f} times as long, {planned:.2f} by the plan for {here}"
        say(f"a step now takes {now:.3g} s instead of {usual:.3g} s: {times}")

    def _is_saved(self, step: int) -> bool:
        """Return whether nothing is left to save after a step; unfinished files of its checkpoint are deleted."""
        checkpointer = self._run.checkpointer
        if checkpointer is None or not self._is_save_due(step):
            return True
        if self._run.is_first:
            checkpointer.discard_unfinished(step + 1)
        self._run.meet()
        is_saved = checkpointer.has(step + 1)
        if is_saved:
            checkpointer.saved = step + 1
        return is_saved
