"""What stands around every script: from the command line to the exit status.

def train(run: TrainingRun[DataParallelSettings]) -> None: ...

if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from distlab.checkpoints.format import has_checkpoints
from distlab.comm.processes import end_with_parent, leave
from distlab.comm.torch_patches import silence_torch_warnings
from distlab.rendezvous.notices import notices
from distlab.rendezvous.ranks import started_by_torchrun
from distlab.run.failure import Failure
from distlab.run.run import Run
from distlab.run.settings import RunSettings, TrainSettings, WorldSize, parse
from distlab.run.training import TrainingRun

SettingsT = TypeVar("SettingsT", bound=RunSettings)


def main(work: Callable[[Any], None], defaults: RunSettings, description: str | None) -> NoReturn:
    """Run a script from its command line to its exit status.

    Args:
        work: takes the `TrainingRun`, or the `Run` if its settings are no `TrainSettings`.
        defaults: the script's settings, which the command line changes.
        description: the script's docstring.

    The exit status is 0 if all went well, 2 for what the user can mend, 130 for Ctrl-C, else 1.
    """
    script = Path(sys.argv[0])
    run: Run[Any] | None = None
    try:
        end_with_launcher()
        silence_torch_warnings()
        settings = parse(with_torchrun_world(defaults), description or script.stem, [*sys.argv[1:], *flags_to_resume()])
        run = new_run(settings, script)
        work(run)
        run.close()
    except BrokenPipeError:
        leave(1)  # the reader of this output has gone, as `head` does
    except (Exception, KeyboardInterrupt) as error:
        failure = Failure.of(error)
        if failure.cause:
            notices.report_exit(failure.cause)
        if isinstance(error, KeyboardInterrupt) and run is not None:
            run.summarize()
        failure.end()
    leave(0)


def new_run(settings: RunSettings, script: Path) -> Run[Any]:
    """The run that a script with such settings works on."""
    return TrainingRun(settings, script) if isinstance(settings, TrainSettings) else Run(settings, script)


def with_torchrun_world(defaults: SettingsT) -> SettingsT:
    """`defaults` with the world size that torchrun's environment gives, where the script has that flag."""
    if started_by_torchrun() and isinstance(defaults, WorldSize):
        defaults.world_size = int(os.environ["WORLD_SIZE"])
    return defaults


def flags_to_resume() -> list[str]:
    """`--resume` with the run's own folder, if torchrun has restarted the ranks and there is something to resume.

    torchrun, or `launch.sh --max-restarts`, does so when a rank has failed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path)
    out = parser.parse_known_args()[0].out
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return ["--resume", str(out)] if restarts and out is not None and has_checkpoints(out) else []


def end_with_launcher() -> None:
    """Have Linux end this rank when the launcher that started it dies, even by SIGKILL: no orphans."""
    if started_by_torchrun() and sys.platform == "linux":
        end_with_parent(signal.SIGKILL)  # a rank that is stopped would not hear SIGTERM
        if os.environ.get("LAB_LAUNCHER", str(os.getppid())) != str(os.getppid()):
            leave(1)  # it died while this rank was starting
