"""Kills ranks at every point of a step (see `dying.py`), and checks that the run goes on.

    python bench/repairs.py                                       60 kills in dp-repair, in shared memory
    python bench/repairs.py --transport gloo                      60 more
    python bench/repairs.py --case 2x3 --schedule zb-h1 --every 3
    python bench/repairs.py --spares --exact                      20 deaths in one run of 200 steps

In each run one rank dies, and three steps later another, which holds other layers where ranks hold different ones. Each
step must have its loss, equal to rounding to that of the undisturbed run. Printed is how much later than usual the step
after a death was complete.
"""

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distlab.pipeline.schedules import all_stages
from distlab.run.progress import each
from simplellm import command_line

BENCH = Path(__file__).resolve().parent
STEPS, FIRST, SECOND = 10, 3, 6
LONG, DEATHS, BETWEEN = 200, 20, 9  # a run with spares: its steps, its deaths, and the steps between two of these
SHAPE = "--data sample --dmodel 32 --num-heads 2 --seq-len 24 --optimizer sgd --lr 0.1 --timeout 30".split()
AFTER_ACTIONS = 6  # points: the sum of the gradients, `run.log`, and the completion of a checkpoint
CASES = {  # script, flags, pipelines x stages
    "dp": ("DP/repair/intro_DP_repair.py", "--n-layers 2 --batch-size 2 --micro-batches 2", (3, 1)),
    "2x3": ("hybrid/intro_hybrid_repair.py", "--n-layers 6 --dp 2 --pp 3 --batch-size 3", (2, 3)),
    "3x2": ("hybrid/intro_hybrid_repair.py", "--n-layers 4 --dp 3 --pp 2 --batch-size 3", (3, 2)),
}


@dataclass
class Settings:
    case: Literal["dp", "2x3", "3x2"] = "dp"
    """the ranks of a run: three replicas, or pipelines x stages"""
    schedule: str = "dapple"
    """of pipelines"""
    transport: Literal["shared", "gloo"] = "shared"
    """of all runs"""
    first: str = "SIGKILL"
    """how the first rank dies: SIGKILL, SIGSTOP, exception"""
    second: str = "SIGKILL"
    """how the second one dies"""
    every: int = 1
    """use every N-th of the points of a step"""
    skip: int = 0
    """points to leave out before the first one"""
    exact: bool = False
    """--repair exact: the losses have to be the same bit for bit"""
    spares: bool = False
    """one long run instead, in which spares take the places of the dead"""


def run(
    settings: Settings, deaths: list[tuple[int, int, int, str]], steps: int = STEPS, spares: int = 0
) -> tuple[list[float], list[float]]:
    """Return the losses of a run with these deaths, and when the line of each step was printed."""
    script, flags, (_, stages) = CASES[settings.case]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "distlab.launch", str(BENCH / "dying.py"), *SHAPE, *flags.split()]
        command += ["--transport", settings.transport, "--out", folder, "--steps", str(steps), "--spares", str(spares)]
        command += ["--save-every", "1"] * (steps == STEPS) + ["--schedule", settings.schedule] * (stages > 1)
        command += ["--repair", "exact" if settings.exact else "on"]
        environment = {**os.environ, "DEATHS": json.dumps(deaths), "LESSON": script}
        times, told = dict[int, float](), 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                told += line.count(" was terminated by ") + line.count(" failed: ")
                if line[0].isdigit():
                    times[int(line.split()[0])] = time.perf_counter()
        if process.returncode:
            raise SystemExit(f"# {deaths}: the run ended with status {process.returncode}")
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    if told != len(deaths):
        raise SystemExit(f"# {deaths}: {told} were told")
    if [record["step"] for record in records] != list(range(steps)):
        raise SystemExit(f"# {deaths}: steps are missing")
    return [record["loss"] for record in records], [times[step] for step in range(steps)]


def points_of(settings: Settings) -> list[tuple[int, int]]:
    """Return the ranks, each with the points of its step."""
    _, _, (pipelines, stages) = CASES[settings.case]
    actions = [4] if stages == 1 else [len(program) for program in all_stages(settings.schedule, stages, 3)]
    ranks = range(pipelines * stages)
    both = [(rank, point) for rank in ranks for point in range(actions[rank % stages] + AFTER_ACTIONS)]
    return both[settings.skip :: settings.every]


def farthest(losses: list[float], expected: list[float]) -> float:
    return max(abs(own - other) for own, other in zip(losses, expected, strict=True))


def compare(settings: Settings) -> None:
    if settings.spares:
        compare_long(settings)
        return
    expected, _ = run(settings, [])
    late, far, ranks = list[float](), 0.0, math.prod(CASES[settings.case][2])
    for rank, point in each(points_of(settings), "runs"):
        deaths = [(rank, FIRST, point, settings.first), ((rank + 1) % ranks, SECOND, point, settings.second)]
        losses, times = run(settings, deaths)
        far = max(far, farthest(losses, expected))
        gaps = [end - start for start, end in itertools.pairwise(times)]
        usual = statistics.median(gaps)
        # A death at a late point of a step delays the next one: its own line has been printed.
        late += [max(gaps[step - 1 : step + 1]) - usual for step in (FIRST, SECOND)]
    what = f"{settings.case}{f' {settings.schedule}' * (settings.case != 'dp')}, {settings.transport}"
    print(f"{len(late)} deaths, {what}: no step lost, losses within {far:.1e} of the undisturbed run")
    print(f"the next step was late by {statistics.median(late):.2f} s (median), {max(late):.2f} s (worst)")


def compare_long(settings: Settings) -> None:
    ranks = math.prod(CASES[settings.case][2])
    deaths = [(number % ranks, (number + 1) * BETWEEN, number % 4, settings.first) for number in range(DEATHS)]
    expected, usual = run(settings, [], LONG)
    losses, times = run(settings, deaths, LONG, DEATHS)
    seconds = times[-1] - times[0], usual[-1] - usual[0]
    print(f"{DEATHS} deaths in {LONG} steps, {settings.case}: losses within {farthest(losses, expected):.1e}")
    print(f"it took {seconds[0]:.1f} s, the undisturbed run {seconds[1]:.1f} s")


if __name__ == "__main__":
    command_line.run(compare, Settings, __doc__)
