"""How long a user waits: from a command to the first loss, to the list of topologies, to the refusal of a wrong flag.

    python bench/starting.py
    python bench/starting.py --rounds 9

The commands take turns, in reversed order every second time; a first turn, which fills the caches, does not count. A
run is killed when it has printed the loss of its first step.
"""

import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lab_runs import LAB
from tables import print_head, print_row, range_of
from turns import results_in_turn

from distlab_exercises.forked import leaving_no_process
from simplellm import command_line
from simplellm.errors import InputError, require

FIRST_LOSS = (
    "python primer/intro.py --data sample",
    "./launch.sh dp-ga --data sample",
    "./launch.sh hybrid --data sample",
)
WHOLE = {"./launch.sh": 0, "./launch.sh dp-ga --no-such-flag": 2}  # and the exit status
WARM_UP_ROUNDS = 1


@dataclass
class Settings:
    """What to measure."""

    rounds: int = 5
    """timed turns of each command"""


def seconds_of(command: str, out: str) -> float:
    """Seconds until a run has printed its first loss, or until another command has ended.

    Args:
        out: a folder for the files of a run.
    """
    own = Path(sys.executable).parent  # launch.sh takes the Python that it finds first
    environment = {"PATH": f"{own}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(LAB / "src")}
    words = shlex.split(command.replace("python", sys.executable, 1))
    if command in FIRST_LOSS:
        words += ["--out", out]
    said = ""
    with leaving_no_process():
        started = time.perf_counter()
        process = subprocess.Popen(
            words,
            cwd=LAB,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if command in FIRST_LOSS and re.match(r"0 +\d", line):
                return time.perf_counter() - started
        status, seconds = process.wait(), time.perf_counter() - started
    if command in FIRST_LOSS or status != WHOLE[command]:
        raise InputError(f"{command} ended with status {status}: {said}")
    return seconds


def main(settings: Settings) -> None:
    require(settings.rounds > 0, f"--rounds {settings.rounds}: give at least 1")
    works = {command: partial(seconds_of, command) for command in (*FIRST_LOSS, *WHOLE)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        seconds = results_in_turn(
            works, lambda _: tempfile.mkdtemp(dir=folder), settings.rounds, WARM_UP_ROUNDS, "rounds"
        )
    print_head("command", "seconds: median:", "range:")
    for command, counted in seconds.items():
        print_row(command, f"{statistics.median(counted):.2f}", range_of(counted))


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
