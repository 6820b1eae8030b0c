"""This machine's ranks as processes: how they start, fail, restart and end.

The ranks get the same environment as from torchrun. To use torchrun's agent, its private methods would have to be
overridden: each machine counts only the restarts after its own failures; a machine whose ranks have finished does not
notice a later failure elsewhere; ranks get 30 seconds to end; and each is a new interpreter, whose import of torch
takes seconds.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from distlab.launching.forks import ForkedScript
from distlab.launching.nodes import NodeRendezvous
from distlab.machine.processes import NEWCOMER
from distlab.machine.supervision import is_stopped
from distlab.rendezvous.survivors import FINISHED, Arbiter
from simplellm.errors import TOO_MANY_PROCESSES, InputError, tell

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_STOPPED = 1.0  # after which a stopped rank is killed, if the others can go on without it
TOO_EARLY, MOST_EARLY_RESTARTS = "some ranks have yet to begin to train", 3
SECONDS_TO_END = 4.0  # after SIGTERM, when a rank has failed; a stopped process does not react to it

Process = ForkedScript | subprocess.Popen[bytes]
WhyLost = Callable[[Collection[int]], str]  # from the running ranks


class TerminatedError(BaseException):
    """This process received a signal that asks it to end; like KeyboardInterrupt, it is not an ordinary failure."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(f"terminated by {by.name}")
        self.signal = by


def raise_signal(number: int, _: object) -> NoReturn:
    """Raise `TerminatedError`; a handler for signals."""
    raise TerminatedError(signal.Signals(number))


@dataclass(frozen=True)
class RankFailure:
    """The failure of a rank."""

    status: int  # exit status; negative for the signal that terminated its process
    record: Mapping[str, Any]  # written by `distlab.run.failure`; {} if the process did not get to it
    timestamp: int  # seconds since the epoch: of the record, or when the exit of the process was noticed

    @property
    def cause(self) -> str:
        """Return it in words that follow the name of the rank."""
        if self.status < 0:
            return f"was terminated by {signal.Signals(-self.status).name}"
        if not self.record:
            return f"failed with exit status {self.status}"
        message = str(self.record["message"])
        return f"failed: {message.partition(' failed: ')[2] or message}"

    @property
    def cannot_be_repaired(self) -> bool:
        """True if the other ranks would fail as well, or the ranks have found out that they wait for each other."""
        return any(self.record.get(name) for name in ("recurs_on_restart", "is_diagnosed"))

    @classmethod
    def of(cls, status: int, file: Path) -> "RankFailure":
        record: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # ValueError: the process was killed while writing
            record = json.loads(file.read_text())
        return cls(status, record, int(record.get("timestamp", time.time())))


def supervise(
    script: Sequence[str],
    rendezvous: NodeRendezvous,
    max_restarts: int,
    errors: Path,
    forks: bool,
    repairs: WhyLost | None = None,
    spares: int = 0,
) -> dict[int, RankFailure]:
    """Run this machine's ranks until the ranks of all machines have finished, or a rank here has finally failed.

    A failure on any machine ends all ranks, and they restart, at most `max_restarts` times; not if the record of the
    failure says `recurs_on_restart`.

    Args:
        script: its path and its arguments.
        rendezvous: with the other machines; it counts the starts of all ranks.
        max_restarts: maximum number of restarts.
        errors: an empty folder, for the records of failures.
        forks: whether ranks are forks of this process instead of new interpreters.
        repairs: if the other ranks go on when one of them fails (`distlab.run.repair`): returns why they cannot. If
            some of them have yet to begin to train, nothing is lost, and all restart.
        spares: number of newcomers that may take the places of ranks that have died.

    Returns:
        By rank, the failures of this machine's ranks, in the order in which they were found; {} for success.

    Raises:
        TerminatedError: this process received a signal, and sent it to the ranks, which have ended.
        InputError, ElsewhereError, StoreError: raised by the rendezvous; the ranks have ended.
    """
    early_restarts = 0
    while True:
        environments, too_early = rendezvous.next_round(), False
        ranks = _Ranks(errors / f"start{rendezvous.restarts}")
        arbiter = Arbiter(rendezvous.ranks_store) if repairs is not None else None
        sent = signal.SIGTERM
        try:
            ranks.start(script, environments, forks)
            while not (ranks.failures or rendezvous.has_next_round()):
                time.sleep(SECONDS_BETWEEN_LOOKS)
                ranks.look()
                if arbiter is not None and repairs is not None:
                    ranks.kill_stopped()
                    failed = [*ranks.failures]
                    too_early = _go_on_without(ranks, arbiter, repairs) == TOO_EARLY
                    for rank in [] if ranks.failures else failed[:spares]:
                        spares -= 1
                        ranks.start_newcomer(script, environments[rank], forks)
                    for number in [number for number in ranks.newcomers if arbiter.is_ready(number)]:
                        ranks.count_newcomer(number)
                        arbiter.tell(ranks.processes, {}, [number])
                if not ranks.processes and not ranks.failures and rendezvous.all_finished():
                    return {}
                rendezvous.check_others()
            has_failed = bool(ranks.failures)
        except TerminatedError as end:
            sent = end.signal
            raise
        finally:
            ranks.end(sent)
        recurs = any(failure.record.get("recurs_on_restart") for failure in ranks.failures.values())
        if too_early and not recurs and rendezvous.restarts == max_restarts and early_restarts < MOST_EARLY_RESTARTS:
            early_restarts, max_restarts = early_restarts + 1, max_restarts + 1
            rendezvous.allow_restart()
        if has_failed and (recurs or rendezvous.restarts == max_restarts):
            return ranks.failures


def _go_on_without(ranks: "_Ranks", arbiter: Arbiter, why_lost: WhyLost) -> str:
    """Tell the running ranks which others have ended, or return why they cannot go on.

    A failure that they can repair is no failure of the run.
    """
    left, causes = ranks.processes, {rank: failure.cause for rank, failure in ranks.failures.items()}
    if not ranks.ended or any(failure.cannot_be_repaired for failure in ranks.failures.values()):
        return ""
    why = why_lost(left) or ("" if arbiter.are_ready(left) else TOO_EARLY)
    if why:
        if causes:
            tell(f"this cannot be repaired: {why}")
        return why
    arbiter.tell(left, {rank: causes.get(rank, FINISHED) for rank in ranks.ended})
    ranks.ended.clear()
    ranks.failures.clear()
    return ""


class _Ranks:
    """The processes of one start of this machine's ranks."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors  # a folder, for the record of each rank
        self.processes: dict[int, Process] = {}  # running ones, by rank
        self.failures: dict[int, RankFailure] = {}  # by rank, in the order in which they were found
        self.newcomers: dict[int, tuple[int, Process]] = {}  # that are not counted yet: their ranks and processes
        self._newcomers = 0  # started so far
        self.ended: list[int] = []  # those that have exited, for whatever reason
        self._stopped: dict[int, float] = {}  # since when

    def start(self, script: Sequence[str], environments: Sequence[Mapping[str, str]], forks: bool) -> None:
        self._errors.mkdir()
        for own in environments:
            self.processes[int(own["RANK"])] = self._start(script, own, forks)

    def start_newcomer(self, script: Sequence[str], environment: Mapping[str, str], forks: bool) -> None:
        """Start another process with the number of a rank that has died."""
        self._newcomers += 1
        (self._errors / environment["RANK"]).unlink(missing_ok=True)
        own = {**environment, NEWCOMER: str(self._newcomers)}
        self.newcomers[self._newcomers] = int(environment["RANK"]), self._start(script, own, forks)

    def count_newcomer(self, number: int) -> None:
        """Count a newcomer among the ranks from now on."""
        rank, process = self.newcomers.pop(number)
        self.processes[rank] = process

    def _start(self, script: Sequence[str], own: Mapping[str, str], forks: bool) -> Process:
        environment = {**os.environ, **own, "TORCHELASTIC_ERROR_FILE": str(self._errors / own["RANK"])}
        try:
            if forks:
                return ForkedScript(script, environment)
            return subprocess.Popen([sys.executable, "-u", *script], env=environment, start_new_session=True)
        except BlockingIOError:
            raise InputError(f"rank {own['RANK']} cannot be started: {TOO_MANY_PROCESSES}") from None

    def look(self) -> None:
        """Collect the processes that have exited."""
        for number, (rank, process) in list(self.newcomers.items()):
            if process.poll() is not None:
                tell(f"a spare for rank {rank} has exited with status {process.poll()}; the run goes on without it")
                del self.newcomers[number]
        for rank, process in list(self.processes.items()):
            status = process.poll()
            if status is not None:
                del self.processes[rank]
                self.ended.append(rank)
            if status:
                self.failures[rank] = RankFailure.of(status, self._errors / str(rank))

    def kill_stopped(self) -> None:
        """Kill the ranks that have been stopped for some time: the others wait for them."""
        now = time.monotonic()
        stopped = {rank for rank, process in self.processes.items() if is_stopped(process.pid)}
        self._stopped = {rank: self._stopped.get(rank, now) for rank in stopped}
        for rank, since in self._stopped.items():
            if now > since + SECONDS_STOPPED:
                _send(signal.SIGKILL, self.processes[rank])

    def end(self, sent: signal.Signals) -> None:
        """Send a signal to the running ranks, and some seconds later SIGKILL to the ones that have not reacted."""
        running = [*self.processes.values(), *(process for _, process in self.newcomers.values())]
        self.newcomers.clear()
        try:
            for process in running:
                _send(sent, process)
            deadline = time.monotonic() + SECONDS_TO_END
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0, deadline - time.monotonic()))
        finally:  # also if a second signal interrupts this
            for process in running:
                _send(signal.SIGKILL, process)
                process.wait()
            self.look()


def _send(sent: signal.Signals, process: Process) -> None:
    """Send a signal to a rank that has not exited, and to the processes that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it is exiting
        if process.poll() is None:
            os.killpg(process.pid, sent)
