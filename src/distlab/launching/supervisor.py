"""This machine's ranks as processes: how they start, fail, restart and end.

The ranks get the same environment as from torchrun. To use torchrun's agent, its private methods would have to be
overridden: each machine counts only the restarts after its own failures; a machine whose ranks have finished does not
notice a later failure elsewhere; ranks get 30 seconds to end; and each is a new interpreter, whose import of torch
takes seconds.
"""

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from distlab.launching.forks import ForkedRank
from distlab.launching.nodes import NodeRendezvous
from distlab.launching.processes import RankFailure, Ranks
from distlab.launching.repairs import Repairs

SECONDS_BETWEEN_LOOKS, SECONDS_WITH_REPAIR = 0.1, 0.03
MOST_EARLY_RESTARTS = 3  # after deaths before all ranks have begun to train


class TerminatedError(BaseException):
    """This process received a signal that asks it to end; like KeyboardInterrupt, it is not an ordinary failure."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(f"terminated by {by.name}")
        self.signal = by


def raise_signal(number: int, _: object) -> NoReturn:
    """Raise `TerminatedError`; a handler for signals."""
    raise TerminatedError(signal.Signals(number))


def supervise(
    script: Sequence[str],
    rendezvous: NodeRendezvous,
    max_restarts: int,
    errors: Path,
    forks: list[ForkedRank],
    repairs: Repairs | None = None,
) -> dict[int, RankFailure]:
    """Run this machine's ranks until the ranks of all machines have finished, or a rank here has finally failed.

    A failure on any machine ends all ranks, and they restart, at most `max_restarts` times; not if the record of the
    failure says `recurs_on_restart`.

    Args:
        script: its path and its arguments.
        rendezvous: with the other machines; it counts the starts of all ranks.
        errors: an empty folder, for the records of failures.
        forks: for the first processes that are started, in the order of their starts; the others are new interpreters.
        repairs: if the other ranks go on when one of them fails (`distlab.run.repair`). If one is killed while others
            have yet to begin to train, nothing is lost, and all restart.

    Returns:
        By rank, the failures of this machine's ranks, in the order in which they were found; {} for success.

    Raises:
        TerminatedError: this process received a signal, and sent it to the ranks, which have ended.
        InputError, ElsewhereError, StoreError: raised by the rendezvous; the ranks have ended.
    """
    early_restarts = 0
    while True:
        environments = rendezvous.next_round()
        ranks = Ranks(script, errors / f"start{rendezvous.restarts}", forks)
        sent = signal.SIGTERM
        try:
            ranks.start(environments)
            if repairs is not None:
                repairs.begin(ranks, rendezvous.ranks_store, environments)
            while not (ranks.failures or rendezvous.has_next_round()):
                time.sleep(SECONDS_BETWEEN_LOOKS if repairs is None else SECONDS_WITH_REPAIR)
                ranks.look()
                if repairs is not None:
                    repairs.look()
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
        is_early = repairs is not None and repairs.is_too_early and early_restarts < MOST_EARLY_RESTARTS
        is_fault = recurs or any(failure.is_own for failure in ranks.failures.values())
        if is_early and not is_fault and rendezvous.restarts == max_restarts:
            early_restarts, max_restarts = early_restarts + 1, max_restarts + 1
            rendezvous.allow_restart()
        if has_failed and (recurs or rendezvous.restarts == max_restarts):
            return ranks.failures
