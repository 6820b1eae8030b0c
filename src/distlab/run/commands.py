"""Suggestions of next steps after a run, as commands that work in the folder in which it was started."""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distlab.axes.layout import layout_size
from distlab.checkpoints import LLAMA
from distlab.machine.processes import started_by_torchrun

if TYPE_CHECKING:
    from distlab.settings.common import ResumableSettings

_CHAPTERS = Path(__file__).resolve().parents[1] / "chapters"  # in a wheel, see setup.py
LAB = _CHAPTERS if _CHAPTERS.exists() else Path(__file__).resolve().parents[3]
TEMPERATURE = 0.5  # small models write readable stories at this temperature
# Environment variables of ranks under launch.sh: its arguments, and a file in which rank 0 notes the run's folder.
LAUNCHED_AS, NOTE_OF_FOLDER = "LAB_LAUNCHED_AS", "LAB_NOTE_OF_FOLDER"


def next_commands(settings: "ResumableSettings", out: Path, saved: int | None) -> Iterator[str]:
    """Yield lines that suggest next steps for a run that has taken steps: a phrase, a colon, a command.

    `saved` is the number of steps at its last checkpoint; None if it wrote none.
    """
    yield f"draw the loss: {_shown(launcher(), 'figures', 'losses', out / 'losses.png', out)}"
    yield f"see the run as a page: {_shown(launcher(), 'page', out)}"
    if saved is not None and settings.architecture == LLAMA:
        command = _shown(launcher(), "tell", out, "--prompt", "Once upon a time")
        yield f"tell a story: {command} --temperature {TEMPERATURE} --seed 1"
    is_launched, is_on_several_machines = LAUNCHED_AS in os.environ, int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    if is_on_several_machines and not is_launched:
        return  # the flags that torchrun was started with on each machine are not known here
    where = " (each machine with its own --node-rank)" if is_on_several_machines else ""
    if not started_by_torchrun() and layout_size(settings.layout) > 1:
        where = " (each rank likewise)"
    (flag, length), steps = settings.length[0].split(), settings.length[1]
    if saved is None:
        every = settings.every_few_steps(min(steps, settings.save_every or steps))  # it may have ended before the first
        again = [*_started_as("--save-every"), "--save-every", str(every)]
        yield f"save the model next time{where}: {_shown(*again)}"
    elif saved < steps:
        yield f"resume{where}: {_shown(*_started_as('--resume'), '--resume', out)}"
    else:
        again = [*_started_as("--resume", flag), "--resume", out, flag, str(2 * int(length))]
        yield f"train longer{where}: {_shown(*again)}"


def _started_as(*replaced: str) -> list[str | Path]:
    """Return the command that started this run, without the `replaced` flags and their values."""
    launched = os.environ.get(LAUNCHED_AS)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in replaced:
        parser.add_argument(flag, f"--{flag[2:].replace('-', '_')}")
    _, args = parser.parse_known_args(sys.argv[1:] if launched is None else shlex.split(launched))
    if launched is not None:
        return [launcher(), *args]
    if started_by_torchrun():
        torchrun = ["torchrun"] if shutil.which("torchrun") else [_python(), "-m", "torch.distributed.run"]
        return [*torchrun, "--standalone", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], sys.argv[0], *args]
    return [_python(), sys.argv[0], *args]


def own_command() -> str:
    """Return the command that started this run."""
    return _shown(*_started_as())


def launcher() -> str:
    """Return the command that starts the lab, as it is typed in the current folder."""
    script = LAB / "launch.sh"
    return os.path.join(".", _short(script)) if script.exists() else "distlab"


def _python() -> str | Path:
    """Return the command for this interpreter."""
    own = Path(sys.executable)
    return next((name for name in ("python", "python3") if shutil.which(name) == str(own)), own)


def _shown(*command: str | Path) -> str:
    return shlex.join(_short(part) if isinstance(part, Path) else part for part in command)


def _short(path: Path) -> str:
    """Return a path, relative to the current folder if it is inside it; never one that looks like a flag."""
    short = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    return os.path.join(".", short) if short.startswith("-") else short
