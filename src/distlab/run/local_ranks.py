"""This machine's ranks of a script, under torchrun's agent: from their start to the end of the run."""

import logging
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from distlab.comm.grid import Grid
from distlab.rendezvous.agent import Agent
from distlab.rendezvous.launcher_flags import Nodes
from distlab.rendezvous.nodes import LOST_NODE_0, ElsewhereError, NodeRendezvous
from distlab.rendezvous.store import StoreError
from distlab.run.commands import LAUNCHED_AS
from distlab.run.settings import RunSettings
from distlab.run.terminal import Terminal, say
from simplellm.errors import InputError, tell

DEFAULT_PORT = 29500  # where node 0 listens, when there are several machines
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)  # signals that ask a launcher to end
AGENT_HANDLES = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # read by torchrun's agent when it starts the ranks
SECONDS_TO_END = 4  # after SIGTERM, when a rank has failed; a stopped process does not react to it


def run_ranks(
    script: Path, args: list[str], settings: RunSettings, nodes: Nodes, max_restarts: int, may_fork: bool = True
) -> int:
    """Run this machine's ranks of `script` under torchrun's agent until the run ends; returns the exit status.

    When a rank fails, the agent ends all ranks and restarts them, at most `max_restarts` times; they resume from the
    last checkpoint (see `distlab.run.main`). If the status is not 0, the last line on stderr says which rank failed and
    why.
    """
    logging.disable()  # torchrun's agent logs many lines for what is one line here
    # Under nohup, SIGHUP is ignored and must stay so; torchrun's agent would install a handler.
    ending = [sent for sent in ENDING if sent is not signal.SIGHUP or signal.getsignal(sent) is not signal.SIG_IGN]
    handled = ",".join(sent.name for sent in ending)
    os.environ |= {"LAB_LAUNCHER": str(os.getpid()), LAUNCHED_AS: shlex.join(sys.argv[1:]), AGENT_HANDLES: handled}
    Terminal(0, has_own=True)  # so that it prints above a status line that a rank may have left
    port = settings.master_port or (0 if len(nodes.ranks_of) == 1 else DEFAULT_PORT)
    rendezvous: NodeRendezvous | None = None  # None until this launcher has found that of node 0
    status, sentence, cause = 0, "", ""  # the cause is reported to the other machines
    with tempfile.TemporaryDirectory() as errors:
        try:
            for sent in ending:  # torchrun's agent does the same, but only after it has started the ranks
                signal.signal(sent, raise_signal)
            rendezvous = NodeRendezvous(nodes, settings.master_addr, port, settings.timeout, max_restarts, say)
            spec = WorkerSpec(
                role="rank",
                local_world_size=nodes.ranks_of[nodes.rank],
                entrypoint=sys.executable,
                args=("-u", str(script), *args),
                rdzv_handler=rendezvous,
                max_restarts=max_restarts,
                monitor_interval=0.1,
            )
            try:
                forks = may_fork and can_fork(settings.device)
                failures = Agent(spec, errors, SECONDS_TO_END, forks=forks).run().failures
            finally:
                for sent in ending:  # the ranks have ended: a signal may now end the wait for the other machines
                    signal.signal(sent, signal.SIG_DFL)
            if failures:
                status, sentence, is_cause = root_cause(failures, Grid(0, settings.layout, settings.held))
                if not is_cause and len(nodes.ranks_of) > 1:
                    rendezvous.await_cause()
                    sentence += "; no report from the other machines"
                cause = sentence
        except SignalException as end:
            status, sentence = 128 + end.sigval, f"terminated by {signal.Signals(end.sigval).name}"
            cause = f"the launcher was {sentence}"
        except InputError as error:
            status, sentence, cause = 2, str(error), str(error)
        except ElsewhereError as error:
            status, sentence = 1, str(error)
        except StoreError as error:
            status, sentence = 1, LOST_NODE_0 if rendezvous else str(error)
    if sentence:
        tell(sentence)
    if rendezvous:
        rendezvous.leave(cause)
    return status


def can_fork(device: str) -> bool:
    """Whether ranks on this `--device` may be forks: on Linux, and where this process cannot have started CUDA."""
    return sys.platform == "linux" and (device == "cpu" or not torch.backends.cuda.is_built())


def count_threads() -> int:
    """The threads of this process, whether or not Python has started them; 0 where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def raise_signal(number: int, _: object) -> NoReturn:
    raise SignalException(f"got signal {number}", signal.Signals(number))


def root_cause(failures: Mapping[int, ProcessFailure], grid: Grid) -> tuple[int, str, bool]:
    """The exit status and a sentence for the rank that failed first, not counting lost peers and our own SIGTERM.

    The third value says whether such a rank is on this machine; if not, the sentence is about the first rank that lost
    a peer.
    """
    first = min(failure.timestamp for failure in failures.values())

    def is_consequence(failure: ProcessFailure) -> bool:
        by_us = failure.exitcode == -signal.SIGKILL and failure.timestamp > first + SECONDS_TO_END / 2  # it was stopped
        return by_us or failure.exitcode == -signal.SIGTERM or bool(failure.error_file_data.get("lost_a_peer"))

    # Of failures in the same second, the one that torchrun found first counts: SIGTERM had not been sent before it.
    rank, failure = min(failures.items(), key=lambda item: (is_consequence(item[1]), item[1].timestamp))
    who = grid.describe(rank)
    is_cause = not is_consequence(failure) or failure.exitcode == -signal.SIGTERM
    sentence = f"{who} failed with exit status {failure.exitcode}"
    if failure.exitcode < 0:
        sentence = f"{who} failed: it was terminated by {failure.signal_name()}"
    elif "status" in failure.error_file_data:  # written by distlab.run.failure
        names_rank = failure.error_file_data.get("names_rank")
        sentence = str(failure.message) if names_rank else f"{who} failed: {failure.message}"
    return max(1, failure.exitcode), sentence, is_cause
