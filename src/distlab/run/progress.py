"""Progress of long work: as plain lines, and in a status line."""

import time
from collections.abc import Callable

from distlab.run.terminal import StatusLine

SECONDS_TO_ESTIMATE = 2.0  # minimum time of several steps for a first estimate
SECONDS_OF_ONE = 10.0  # after this time, a single step is enough
FEW_STEPS = 20  # up to this number, the rate is over all steps
SECONDS_BETWEEN_LINES = 60.0
SECONDS_BETWEEN_REDRAWS = 0.2


class Progress:
    """Prints an estimate of the time left, first after a few steps and then about every minute.

    The estimate is of wall-clock time: it includes validation and checkpoints, which are not part of a step. It is
    based on the later half of the steps so far, because the speed of a machine may change.

    Args:
        done: number of steps done earlier, which are not timed.
        speed: (steps per second) -> text for the speed.
        warms_up: ignore the time of the first step, which takes longer than the others.
    """

    def __init__(
        self,
        total: int,
        say: Callable[[str], object],
        *,
        done: int = 0,
        what: str = "steps",
        speed: Callable[[float], str] | None = None,
        warms_up: bool = True,
        status: StatusLine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._say, self._done, self._what, self._speed, self._clock = total, say, done, what, speed, clock
        self._status = status or StatusLine(None)
        self._ends = [] if warms_up else [clock()]  # when each step ended
        self._next_line: float | None = None  # when the next line is due; None before the first estimate
        self._next_redraw = 0.0
        self._status.show(f"{done:,} of {total:,} {what}")

    def advance(self, done: int) -> None:
        """Note how many steps are done; call this at the end of each, after its validation and checkpoint."""
        now = self._clock()
        self._ends.append(now)
        self._done = done
        left, timed, seconds = self._total - self._done, len(self._ends) - 1, now - self._ends[0]
        if left <= 0:
            self._status.clear()
            return
        if self._next_line is None:
            if timed > 0 and seconds >= (SECONDS_TO_ESTIMATE if timed > 2 else SECONDS_OF_ONE):
                rest = f"{left:,} {self._what}" if left > 1 else self._what.removesuffix("s")
                self._say(f"about {human_time(left / self._rate())} for the remaining {rest}")
                self._next_line = now + SECONDS_BETWEEN_LINES
        elif now >= self._next_line:
            self._say(self._state())
            self._next_line = now + SECONDS_BETWEEN_LINES
        if now >= self._next_redraw:
            self._status.show(self._state())
            self._next_redraw = now + SECONDS_BETWEEN_REDRAWS

    def _rate(self) -> float:
        """Return the steps per second, over the later half of the steps, or over all if they are few."""
        timed = len(self._ends) - 1
        first = timed // 2 if timed > FEW_STEPS else 0
        return (timed - first) / max(self._ends[-1] - self._ends[first], 1e-9)

    def _state(self) -> str:
        parts = [f"{self._done:,} of {self._total:,} {self._what}"]
        if len(self._ends) > 1:
            rate = self._rate()
            parts += [self._speed(rate)] if self._speed else []
            parts.append(f"about {human_time((self._total - self._done) / rate)} left")
        return ", ".join(parts)


def human_time(seconds: float) -> str:
    """Return a duration as text, such as 1 h 52 min; at least 1 s."""
    if seconds < 99.5:
        return f"{max(1.0, seconds):.0f} s"
    minutes = round(seconds / 60)
    hours, days = minutes // 60, minutes // 60 // 24
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if days < 2 else f"{days} d {hours % 24} h"
