"""Programs that use only the backend of the lab: how their ranks end, and the summary at the end.

    import distlab
    dist.init_process_group("lab")

A wait that fails becomes a sentence that says which rank waits for which, as in a run of the lab, and rank 0 prints the
bytes and messages that it sent.
"""

import atexit
import sys
from dataclasses import dataclass
from types import TracebackType

from distlab.comm.context import Context
from distlab.machine.torch_patches import silence_torch_warnings
from distlab.run.failure import Failure
from distlab.run.logs import sent_by_kind
from distlab.run.terminal import say
from distlab.settings.common import RunSettings, WorldSize


@dataclass
class ProgramSettings(WorldSize, RunSettings):
    """The settings with which launch.sh starts a program that has no `DEFAULTS`."""

    world_size: int = 2
    """ranks"""


def explain_failures(rank: int) -> None:
    """Make an exception of this process end as a failure of a run does; call it before the ranks connect."""
    silence_torch_warnings()
    stderr = sys.stderr

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stderr = stderr  # torch's hook calls this one, and would print its output after it; but this process exits
        Failure.of(error, rank).end()

    sys.excepthook = end


def summarize_at_exit(context: Context) -> None:
    """Print how long rank 0 has waited and what it has sent when the process exits."""

    def summarize() -> None:
        say(f"rank 0 waited {context.waited_so_far():.1f} s for other ranks")
        for line in sent_by_kind(0, context.ledger):
            say(line)

    if context.rank == 0:
        atexit.register(summarize)
