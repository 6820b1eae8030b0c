"""The processes of this machine's ranks, and the spares that may take their places."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlab.launching.forks import Forked, ForkedRank, handlers_later
from distlab.machine.processes import NEWCOMER, is_stopped
from simplellm.errors import InputError
from simplellm.exit_status import TOO_MANY_PROCESSES

SECONDS_STOPPED = 1.0  # after which a stopped rank is killed, if the others can go on without it
SECONDS_TO_END = 4.0  # after SIGTERM, when a rank has failed; a stopped process does not react to it

Process = Forked | subprocess.Popen[bytes]


@dataclass(frozen=True)
class RankFailure:
    """The failure of a rank."""

    status: int  # exit status; negative for the signal that terminated its process
    record: Mapping[str, Any]  # written by `distlab.run.failure`; {} if the process did not get to it
    timestamp: int  # seconds since the epoch: of the record, or when the exit of the process was noticed

    @property
    def cause(self) -> str:
        """Return it in words that follow the name of the rank: "was terminated by SIGKILL"."""
        if self.status < 0:
            names = {known.value: known.name for known in signal.Signals}  # most real-time signals have none
            return f"was terminated by {names.get(-self.status, f'signal {-self.status}')}"
        message = self.record.get("message")
        if not isinstance(message, str):  # no record, or the one of torch's `record`
            return f"failed with exit status {self.status}"
        after_name = message.partition(" failed: ")[2] if self.record.get("names_rank") else ""
        return f"failed: {after_name or message}"

    @property
    def cannot_be_repaired(self) -> bool:
        """True if the other ranks would fail as well, or the ranks have found out that they wait for each other."""
        return any(self.record.get(name) for name in ("recurs_on_restart", "is_diagnosed"))

    @property
    def is_own(self) -> bool:
        """True if the rank has failed by itself: no signal ended it, and it has not lost another rank."""
        return self.status > 0 and not self.record.get("lost_a_peer")

    @classmethod
    def of(cls, status: int, file: Path) -> "RankFailure":
        record: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # ValueError: the process was killed while writing
            record = json.loads(file.read_text())
        return cls(status, record, int(record.get("timestamp", time.time())))


@contextlib.contextmanager
def can_start(who: str) -> Iterator[None]:
    """Turn the error of a system that cannot start a process into an `InputError`."""
    try:
        yield
    except BlockingIOError:
        raise InputError(f"{who} cannot be started: {TOO_MANY_PROCESSES}") from None
    except OSError as error:
        raise InputError(f"{who} cannot be started: {error.strerror}") from error


class Ranks:
    """The processes of one start of this machine's ranks.

    Args:
        script: its path and its arguments.
        errors: a folder to be made, for the records of failures.
        forks: that have yet to begin (`fork_ranks`). Those that begin are taken out; when too few are left, processes
            are new interpreters, which take seconds to import torch.
    """

    def __init__(self, script: Sequence[str], errors: Path, forks: list[ForkedRank]) -> None:
        self._script, self._errors, self._forks = script, errors, forks
        self.processes: dict[int, Process] = {}  # running ones, by rank
        self.failures: dict[int, RankFailure] = {}  # by rank, in the order in which they were found
        self.ended: list[int] = []  # those that have exited, for whatever reason
        self._spares: dict[int, Process] = {}  # those that are not counted among the ranks, by their numbers
        self._stopped: dict[Process, float] = {}  # since when
        self._records: dict[Process, Path] = {}  # files for the record of a failure

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        self._errors.mkdir()
        self._start(self.processes, {int(own["RANK"]): own for own in environments}, "the ranks")

    def start_spare(self, number: int, of_others: Mapping[str, str]) -> None:
        """Start a process that will be told which rank's place it takes."""
        own = {**of_others, "RANK": "-1", NEWCOMER: str(number)}
        self._start(self._spares, {number: own}, f"spare {number}")

    def exited_spares(self) -> dict[int, RankFailure]:
        """Return the spares that have exited since the last call, and how."""
        exited: dict[int, RankFailure] = {}
        for number, process in list(self._spares.items()):
            status = process.poll()
            if status is not None:
                del self._spares[number]
                exited[number] = RankFailure.of(status, self._records[process])
        return exited

    def count_spare(self, number: int, rank: int) -> None:
        """Count a spare among the ranks from now on."""
        self.processes[rank] = self._spares.pop(number)

    def _start(self, among: dict[int, Process], group: Mapping[int, Mapping[str, str]], who: str) -> None:
        forks = self._forks if len(self._forks) >= len(group) else []  # a start is as slow as its slowest
        with can_start(who), handlers_later():  # a signal between a start and its entry would leave a process running
            for number, variables in group.items():
                record = self._errors / str(len(self._records))
                own = {**variables, "TORCHELASTIC_ERROR_FILE": str(record)}
                if forks:
                    among[number] = fork = forks.pop(0)
                    fork.begin(own)
                else:
                    command = [sys.executable, "-u", *self._script]
                    among[number] = subprocess.Popen(command, env={**os.environ, **own}, start_new_session=True)
                self._records[among[number]] = record

    def look(self) -> None:
        """Collect the ranks that have exited."""
        for rank, process in list(self.processes.items()):
            status = process.poll()
            if status is not None:
                del self.processes[rank]
                self.ended.append(rank)
            if status:
                self.failures[rank] = RankFailure.of(status, self._records[process])

    def kill(self, rank: int) -> None:
        """End a rank that cannot go on; this is not a failure."""
        self._kill(self.processes.pop(rank))

    def kill_spare(self, number: int) -> None:
        self._kill(self._spares.pop(number))

    def _kill(self, process: Process) -> None:
        _send(signal.SIGKILL, process)
        process.wait()

    def kill_stopped(self) -> None:
        """Kill the ranks and spares that have been stopped for some time: the others wait for them."""
        now = time.monotonic()
        stopped = [process for process in self._running() if is_stopped(process.pid)]
        self._stopped = {process: self._stopped.get(process, now) for process in stopped}
        for process, since in self._stopped.items():
            if now > since + SECONDS_STOPPED:
                _send(signal.SIGKILL, process)

    def _running(self) -> list[Process]:
        return [*self.processes.values(), *self._spares.values()]

    def end(self, sent: signal.Signals) -> None:
        """Send a signal to the running ranks, and some seconds later SIGKILL to the ones that have not reacted."""
        running = self._running()
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
            try:
                os.killpg(process.pid, sent)
            except ProcessLookupError:  # a fork that has yet to make its group
                os.kill(process.pid, sent)
