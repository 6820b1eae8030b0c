"""Kills every rank at every point of a step (see `dying.py`), and checks that the run goes on.

    python bench/repairs.py                     60 kills in shared memory
    python bench/repairs.py --transport gloo    60 more

In each run of three ranks, one rank dies, and three steps later another, so that one is left. Each step must have its
loss, equal to rounding to that of the undisturbed run. Printed is how much later than usual the step after a death was
complete.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distlab.run.progress import each
from simplellm import command_line

BENCH = Path(__file__).resolve().parent
RANKS, POINTS, STEPS, FIRST, SECOND = 3, 10, 10, 3, 6
SHAPE = "--data sample --dmodel 32 --num-heads 2 --n-layers 2 --seq-len 24 --batch-size 2 --micro-batches 2"
RUN = f"{SHAPE} --steps {STEPS} --optimizer sgd --lr 0.1 --timeout 30 --save-every 1".split()


@dataclass
class Settings:
    transport: Literal["shared", "gloo"] = "shared"
    """of all runs"""
    first: str = "SIGKILL"
    """how the first rank dies: SIGKILL, SIGSTOP, exception"""
    second: str = "SIGKILL"
    """how the second one dies"""


def run(settings: Settings, deaths: list[tuple[int, int, int, str]]) -> tuple[list[float], list[float]]:
    """Return the losses of a run with these deaths, and when the line of each step was printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "distlab.launch", str(BENCH / "dying.py"), *RUN]
        command += ["--transport", settings.transport, "--out", folder]
        times: dict[int, float] = {}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "DEATHS": json.dumps(deaths)}
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line[0].isdigit():
                    times[int(line.split()[0])] = time.perf_counter()
        if process.returncode:
            raise SystemExit(f"# {deaths}: the run ended with status {process.returncode}")
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    if [record["step"] for record in records] != list(range(STEPS)):
        raise SystemExit(f"# {deaths}: steps are missing")
    return [record["loss"] for record in records], [times[step] for step in range(STEPS)]


def compare(settings: Settings) -> None:
    expected, _ = run(settings, [])
    late, farthest = [], 0.0
    for rank, point in each(list(itertools.product(range(RANKS), range(POINTS))), "runs"):
        deaths = [(rank, FIRST, point, settings.first), ((rank + 1) % RANKS, SECOND, point, settings.second)]
        losses, times = run(settings, deaths)
        farthest = max(farthest, *(abs(own - other) for own, other in zip(losses, expected, strict=True)))
        gaps = [end - start for start, end in itertools.pairwise(times)]
        usual = statistics.median(gaps)
        # A death at a late point of a step delays the next one: its own line has been printed.
        late += [max(gaps[step - 1 : step + 1]) - usual for step in (FIRST, SECOND)]
    print(
        f"{len(late)} deaths, {settings.transport}: no step lost, losses within {farthest:.1e} of the undisturbed run"
    )
    print(f"the next step was late by {statistics.median(late):.2f} s (median), {max(late):.2f} s (worst)")


if __name__ == "__main__":
    command_line.run(compare, Settings, __doc__)
