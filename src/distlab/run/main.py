"""The entry point of every script: `main(train, DEFAULTS, __doc__)`, from the command line to the exit status."""

import argparse
import contextlib
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from distlab.axes.layout import layout_size
from distlab.machine.processes import NEWCOMER, end_with_parent, leave, require_open_files, started_by_torchrun
from distlab.machine.torch_patches import silence_torch_warnings
from distlab.run.run import Run
from distlab.run.starting import identity
from distlab.run.terminal import say
from distlab.run.training import TrainingRun
from distlab.settings.common import RunSettings, parse
from distlab.settings.training import TrainSettings
from simplellm.errors import InputError, open_streams


def main(work: Callable[[Any], None], defaults: RunSettings, description: str | None) -> NoReturn:
    """Run a script's `work`, which takes a `TrainingRun` if the defaults are `TrainSettings`, else a `Run`; then exit.

    A lesson's script has few flags. Its `MORE` is the path, from the script's folder, of a script that also has the
    flags of later chapters: it runs instead if it exists and the script itself refuses its flags.

    The exit status is 0 for success, 2 for an error that the user can correct, 130 for Ctrl-C, 141 if the reader of
    the output has exited, else 1.
    """
    script, rank = Path(sys.argv[0]), int(os.environ["RANK"]) if started_by_torchrun() else 0
    run: Run[Any] | None = None
    open_streams()
    try:
        warn_of_other_checkout(script)
        end_with_launcher()
        require_open_files()
        silence_torch_warnings()
        args = [*sys.argv[1:], *flags_to_resume()]
        names = getattr(work, "__globals__", {})
        more = script.parent / names["MORE"] if "MORE" in names else None
        try:
            settings = parse(defaults, description or script.stem, args, more=more)
        except InputError:
            if more is None:
                raise
            from distlab.settings.scripts import read_script_for

            become(read_script_for(script, args)[0].path)
        if NEWCOMER in os.environ:
            from distlab.run.repairable import await_place

            await_place(settings)
        rank, _ = identity(settings)
        run = training_run(settings, script) if isinstance(settings, TrainSettings) else Run(settings, script)
        work(run)
        run.close()
    except (Exception, KeyboardInterrupt) as error:
        from distlab.run.failure import Failure

        failure = Failure.of(error, rank)
        if run is not None:
            with contextlib.suppress(BrokenPipeError):  # Ctrl-C also ends the reader of the output
                run.end_early(error)
        failure.end()
    leave(0)


def training_run(settings: Any, script: Path) -> TrainingRun[Any]:
    """Make the run of a script that trains the Llama, of the class that its flags need."""
    if settings.can_repair and layout_size(settings.layout) > 1:
        from distlab.run.repairable import RepairableRun

        return RepairableRun(settings, script)
    if getattr(settings, "run_on", False):
        from distlab.run.run_on import UndoableRun

        return UndoableRun(settings, script)
    if settings.clip_norm is not None:
        from distlab.run.clipping import ClippingRun

        return ClippingRun(settings, script)
    return TrainingRun(settings, script)


def warn_of_other_checkout(script: Path) -> None:
    """Print a line if the script is of one checkout of the lab, and this environment has the library of another."""
    used = Path(__file__).resolve().parents[2]
    for folder in script.resolve().parents:
        own = folder / "src"
        if own != used and (own / "distlab/run/main.py").exists() and os.environ.get("RANK", "0") == "0":
            say(f"this run uses the library in {used}, not in {own}: start it with ./launch.sh, or PYTHONPATH={own}")


def become(script: Path) -> NoReturn:
    """Run another script instead, with the same flags."""
    if os.environ.get("RANK", "0") == "0":  # without torchrun, each rank has its terminal
        say(f"these flags are those of {script.name}, which runs now")
    sys.argv[0] = str(script)
    runpy.run_path(sys.argv[0], run_name="__main__")
    leave(0)


def flags_to_resume() -> list[str]:
    """Return `--resume` and the run's folder if torchrun restarted the ranks and there are checkpoints; else [].

    Also for a spare of a resumed run, which may have deleted the checkpoint that its flags name.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--out", "--resume"):
        parser.add_argument(flag, type=Path)
    given = parser.parse_known_args()[0]
    restarts, out = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), given.out
    if out is None or not (restarts or (NEWCOMER in os.environ and given.resume)):
        return []
    from distlab.checkpoints.format import has_checkpoints

    return ["--resume", str(out)] if has_checkpoints(out) else []


def end_with_launcher() -> None:
    """On Linux, end this rank when its launcher dies, even by SIGKILL, so that no orphans remain."""
    if started_by_torchrun() and sys.platform == "linux":
        launcher = int(os.environ.get("LAB_LAUNCHER", os.getppid()))
        end_with_parent(signal.SIGKILL, launcher)  # a stopped process would not react to SIGTERM
