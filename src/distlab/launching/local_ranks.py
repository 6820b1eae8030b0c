"""This machine's ranks of a script, from their start to the end of the run, and the sentence about a failure."""

import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from distlab.axes.grid import Grid
from distlab.launching.forks import ForkedRank, fork_ranks
from distlab.launching.launcher_flags import Nodes
from distlab.launching.nodes import LOST_NODE_0, ElsewhereError, NodeRendezvous
from distlab.launching.processes import SECONDS_TO_END, RankFailure, can_start
from distlab.launching.repairs import Repairs
from distlab.launching.supervisor import TerminatedError, raise_signal, supervise
from distlab.machine.compilers import import_compiler
from distlab.machine.memory_limits import memory_kills
from distlab.machine.processes import require_open_files
from distlab.rendezvous.store import StoreError
from distlab.run.commands import LAUNCHED_AS, NOTE_OF_FOLDER
from distlab.run.logs import LAUNCHER_LOG
from distlab.run.terminal import Terminal
from distlab.settings.common import RunSettings
from distlab.settings.replicas import RepairFlag
from simplellm.errors import InputError, tell

FORKED_STARTS = 2  # of all ranks; later ones take the time of an interpreter that imports torch
DEFAULT_PORT = 29500  # where node 0 listens, when there are several machines
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)  # signals that ask a launcher to end


def run_ranks(
    script: Path,
    args: list[str],
    settings: RunSettings,
    nodes: Nodes,
    max_restarts: int,
    may_fork: bool = True,
    spares: int = 0,
) -> int:
    """Run this machine's ranks of `script` until the run ends; return the exit status.

    When a rank fails, all ranks end and start again, at most `max_restarts` times; they resume from the last checkpoint
    (see `distlab.run.main`). With `--repair`, `spares` processes may take the places of dead ranks. If the status is
    not 0, the last line on stderr says which rank failed and why.
    """
    require_open_files()
    # Under nohup, SIGHUP is ignored and must stay so.
    ending = [sent for sent in ENDING if sent is not signal.SIGHUP or signal.getsignal(sent) is not signal.SIG_IGN]
    os.environ |= {"LAB_LAUNCHER": str(os.getpid()), LAUNCHED_AS: shlex.join(sys.argv[1:])}
    Terminal(0, has_own=True)  # so that it prints above a status line that a rank may have left
    port = settings.master_port or (0 if len(nodes.ranks_of) == 1 else DEFAULT_PORT)
    rendezvous: NodeRendezvous | None = None  # None until this launcher has found the one of node 0
    command = [str(script), *args]
    forks: list[ForkedRank] = []
    kills, (status, sentence, cause) = memory_kills(), (0, "", "")  # the cause is reported to the other machines
    with temporary_folder() as errors:
        note = errors / "folder"
        os.environ[NOTE_OF_FOLDER] = str(note)
        try:
            for sent in ending:
                signal.signal(sent, raise_signal)
            has_no_cuda = settings.device == "cpu" or not torch.backends.cuda.is_built()
            if may_fork and has_no_cuda and sys.platform == "linux":  # a fork cannot use CUDA
                if getattr(settings, "compile", False):
                    import_compiler()  # once, instead of in each rank
                starts = min(1 + max_restarts, FORKED_STARTS)
                with can_start("the ranks"):
                    forks = fork_ranks(command, starts * nodes.ranks_of[nodes.rank] + spares)
            rendezvous = NodeRendezvous(nodes, settings.master_addr, port, settings.timeout, max_restarts)
            try:
                repairs = (
                    Repairs(settings, spares) if isinstance(settings, RepairFlag) and settings.can_repair else None
                )
                failures = supervise(command, rendezvous, max_restarts, errors, forks, repairs)
            finally:
                for sent in ending:  # the ranks have ended: a signal may now end the wait for the other machines
                    signal.signal(sent, signal.SIG_DFL)
            if failures:
                status, sentence, is_cause = root_cause(failures, Grid(0, settings.layout, settings.held))
                if sentence.endswith(signal.SIGKILL.name) and memory_kills() > kills:
                    sentence += ", for this machine or its container had no memory left"
                if not is_cause and len(nodes.ranks_of) > 1:
                    rendezvous.await_cause()
                    sentence += "; no report from the other machines"
                cause = sentence
        except TerminatedError as end:
            status, sentence = 128 + end.signal, str(end)
            cause = f"the launcher was {sentence}"
        except InputError as error:
            status, sentence, cause = 2, str(error), str(error)
        except ElsewhereError as error:
            status, sentence = 1, str(error)
        except StoreError as error:
            status, sentence = 1, LOST_NODE_0 if rendezvous else str(error)
        if sentence and note.exists():  # for the run's page: a rank that is killed cannot report it
            with contextlib.suppress(OSError), (Path(os.fsdecode(note.read_bytes())) / LAUNCHER_LOG).open("a") as log:
                log.write(f"# {sentence}\n")
    for fork in forks:
        fork.cancel()
    if sentence:
        tell(sentence)
    if rendezvous:
        rendezvous.leave(cause)
    return status


def root_cause(failures: Mapping[int, RankFailure], grid: Grid) -> tuple[int, str, bool]:
    """Return the exit status and a sentence for the rank that failed first, except for lost peers and our own SIGTERM.

    The third value says whether such a rank is on this machine; if not, the sentence is about the first rank that lost
    a peer.
    """
    first = min(failure.timestamp for failure in failures.values())

    def is_consequence(failure: RankFailure) -> bool:
        by_us = failure.status == -signal.SIGKILL and failure.timestamp > first + SECONDS_TO_END / 2  # it was stopped
        return by_us or failure.status == -signal.SIGTERM or bool(failure.record.get("lost_a_peer"))

    # Among failures in the same second, the one found first counts: SIGTERM had not been sent before it.
    rank, failure = min(failures.items(), key=lambda item: (is_consequence(item[1]), item[1].timestamp))
    who = grid.describe(rank)
    is_cause = not is_consequence(failure) or failure.status == -signal.SIGTERM
    told = str(failure.record.get("message"))
    is_named = failure.status > 0 and (failure.record.get("names_rank") or told.startswith(f"rank {rank} "))
    sentence = told if is_named else f"{who} {failure.cause}"
    return max(1, failure.status), sentence, is_cause


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is deleted at the end of the context; unlike `TemporaryDirectory`, not when a fork ends."""
    folder = tempfile.mkdtemp()
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
