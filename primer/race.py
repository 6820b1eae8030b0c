"""A race: processes that update one number in shared memory lose updates; two fixes, and what they cost.

    python primer/race.py                         or: ./launch.sh race
    python primer/race.py --processes 2 --repeats 3000000

`value += 1` is three operations: read the value, add one, write the result. If another process writes in between, its
update is overwritten. Nothing fails, and the result differs each time. There are two fixes: only one process at a time
may read and write (a lock); or each process has its own number, and the numbers are added up at the end, as in an
all-reduce.
"""

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Lock
from typing import Any

from distlab.machine.processes import end_with_parent
from distlab.run.main import main
from distlab.run.run import Run
from distlab.run.terminal import say
from distlab.settings.common import MOST_RANKS, RunSettings, require_positive
from simplellm.errors import InputError

PROCESSES = multiprocessing.Process, multiprocessing.Barrier
THREADS = threading.Thread, threading.Barrier


@dataclass
class RaceSettings(RunSettings):
    """The demonstration's command line."""

    processes: int = 3
    """number of processes, and then of threads, that add to one number"""
    repeats: int = 1_000_000
    """how often each of them adds 1"""

    def check(self) -> None:
        super().check()
        require_positive(self, "repeats")
        if self.processes < 2:
            raise InputError(f"--processes {self.processes}: a race needs at least 2")
        if self.processes > MOST_RANKS:
            raise InputError(f"--processes {self.processes}: give at most {MOST_RANKS:,}")


DEFAULTS = RaceSettings()


@dataclass
class Number:
    """A plain int, which threads share. Processes share a `RawValue` instead: eight bytes of common memory."""

    value: int = 0


def add(number: Number, repeats: int) -> None:
    for _ in range(repeats):
        number.value += 1


def add_under_lock(number: Number, repeats: int, lock: Lock) -> None:
    for _ in range(repeats):
        with lock:
            number.value += 1


def add_by_call(number: Number, repeats: int) -> None:
    for _ in range(repeats):
        number.value = plus_one(number.value)


def plus_one(value: int) -> int:
    return value + 1


def side_by_side(
    kind: tuple[Any, Any], work: Callable[..., None], jobs: list[tuple[Any, ...]], timeout: float
) -> float:
    """Return the seconds for `work(*job)` of all jobs at once, each in a separate process or thread (`kind`).

    Raises:
        InputError: they were not done after `timeout` seconds.
    """
    worker, barrier = kind
    together = barrier(len(jobs) + 1, timeout=timeout)
    workers = [worker(target=work_together, args=(together, work, *job)) for job in jobs]
    try:
        for each in workers:
            each.start()
        together.wait()
        started = time.perf_counter()
        together.wait()
        seconds = time.perf_counter() - started
        for each in workers:
            each.join()
    except threading.BrokenBarrierError:
        raise InputError(
            f"--timeout {timeout:g}: {work.__name__} takes longer; give more, or fewer --repeats"
        ) from None
    finally:
        for each in workers:
            if isinstance(each, multiprocessing.Process) and each.pid is not None:
                each.kill()  # if it still computes; threads end with this process
    return seconds


def work_together(together: threading.Barrier, work: Callable[..., None], *job: Any) -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        end_with_parent(signal.SIGKILL, parent.pid)
    with contextlib.suppress(threading.BrokenBarrierError, KeyboardInterrupt):  # `side_by_side` reports it
        together.wait()
        work(*job)
        together.wait()


def race(run: Run[RaceSettings]) -> None:
    args = run.settings
    count, repeats = args.processes, args.repeats
    meant = count * repeats

    def report(what: str, result: int, seconds: float) -> int:
        say(f"{what:<40} {result:>13,} {meant - result:>13,} {seconds:>8.2f}")
        return meant - result

    say(f"{count} processes or threads add 1, {repeats:,} times each: {meant:,} is right")
    say(f"{'':<40} {'result':>13} {'lost':>13} {'seconds':>8}")

    for _ in range(3):  # to show that the result differs each time
        shared = multiprocessing.RawValue("q")
        seconds = side_by_side(PROCESSES, add, [(shared, repeats)] * count, args.timeout)
        if not report("processes, one number", shared.value, seconds):
            say("nothing was lost this time; the race is there all the same, and more --repeats will show it")

    shared, lock = multiprocessing.RawValue("q"), multiprocessing.Lock()
    seconds_with_lock = side_by_side(PROCESSES, add_under_lock, [(shared, repeats, lock)] * count, args.timeout)
    report("processes, one number, a lock", shared.value, seconds_with_lock)

    own = [multiprocessing.RawValue("q") for _ in range(count)]
    seconds = side_by_side(PROCESSES, add, [(number, repeats) for number in own], args.timeout)
    report("processes, a number each, added up", sum(number.value for number in own), seconds)
    say(f"the lock takes {seconds_with_lock / seconds:.1f} times as long as a number each; both are exact")

    plain = Number()
    seconds = side_by_side(THREADS, add, [(plain, repeats)] * count, args.timeout)
    if not report("threads, one number", plain.value, seconds):
        say("CPython since 3.10 switches threads only where a loop jumps back or a function is called, so not within")
        say("this update. Nothing guarantees that. With a call in between:")
    plain = Number()
    seconds = side_by_side(THREADS, add_by_call, [(plain, repeats)] * count, args.timeout)
    report("threads, one number, a call in between", plain.value, seconds)


if __name__ == "__main__":
    main(race, DEFAULTS, __doc__)
