"""Kills ranks at every point of a step (see `dying.py`), and checks that the run goes on.

    python bench/repairs.py                                       dp-repair: each point of a step in turn
    python bench/repairs.py --case 2x3 --schedule zb-h1 --record runs/deaths.jsonl
    python bench/repairs.py --report runs/deaths.jsonl            a table of all recorded runs
    python bench/repairs.py --case 2x3 --spares --exact           20 deaths in one run of 200 steps
    python bench/repairs.py --case 2x3 --speed                    tokens/s before and after a death

In each run one rank dies, and three steps later another, which holds other layers where ranks hold different ones. Each
step must have its loss, equal to rounding to that of the undisturbed run. Printed is how much later than usual the step
after a death was complete. With `--record`, runs that the file already has are left out.
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
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from distlab.pipeline.schedules import all_stages
from distlab.run.progress import each
from simplellm import command_line

BENCH = Path(__file__).resolve().parent
STEPS, FIRST, SECOND = 10, 3, 6
LONG, DEATHS, BETWEEN = 200, 20, 9  # a run with spares: its steps, its deaths, and the steps between two of these
STEPS_FOR_SPEED = 40  # a rank dies in the middle
ROUNDING = 1e-6  # a larger difference of losses is none of rounding
WIDE = "--dmodel 256 --num-heads 4 --seq-len 128".split()  # so that ranks mostly compute
SHAPE = "--data sample --dmodel 32 --num-heads 2 --seq-len 24 --optimizer sgd --lr 0.1 --timeout 30".split()
AFTER_ACTIONS = 6  # points: the sum of the gradients, `run.log`, and the completion of a checkpoint
HYBRID = "hybrid/intro_hybrid_repair.py"
CASES = {  # script, flags, pipelines x stages x slices
    "dp": ("DP/repair/intro_DP_repair.py", "--n-layers 2 --batch-size 2 --micro-batches 2", (3, 1, 1)),
    "2x3": (HYBRID, "--n-layers 6 --dp 2 --pp 3 --batch-size 3", (2, 3, 1)),
    "3x2": (HYBRID, "--n-layers 4 --dp 3 --pp 2 --batch-size 3", (3, 2, 1)),
    "2x2x2": (HYBRID, "--n-layers 4 --dp 2 --pp 2 --tp 2 --batch-size 3", (2, 2, 2)),
}
Death = tuple[int, int, int, str]  # rank, step, point, how


@dataclass
class Settings:
    case: Literal["dp", "2x3", "3x2", "2x2x2"] = "dp"
    """the ranks of a run: three replicas, or pipelines x stages, or pipelines x stages x slices"""
    schedule: str = "dapple"
    """of pipelines"""
    transports: list[str] = field(default_factory=lambda: ["shared", "gloo"])
    """of the runs, in turn"""
    hows: list[str] = field(default_factory=lambda: ["SIGKILL", "SIGSTOP", "exception"])
    """how ranks die, in turn: SIGKILL, SIGSTOP, exception"""
    every: int = 1
    """use every N-th of the points of a step"""
    all_ranks: bool = False
    """visit each point on every rank, and not on one rank"""
    exact: bool = False
    """--repair exact: the losses have to be the same bit for bit"""
    record: Path | None = None
    """file to add each run to"""
    report: Path | None = None
    """print a table of the runs in this file, and run nothing"""
    spares: bool = False
    """one long run instead, in which spares take the places of the dead"""
    speed: bool = False
    """one run instead, with its speed before and after a death"""


@dataclass
class Run:
    losses: list[float]
    speeds: list[float]  # tokens/s, by step
    times: list[float]  # when the line of each step was printed
    backs: list[float]  # when it was printed that ranks are back


def run(settings: Settings, deaths: list[Death], transport: str, steps: int = STEPS, spares: int = 0) -> Run:
    """Run the ranks, which die these deaths."""
    script, flags, (_, stages, _) = CASES[settings.case]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "distlab.launch", str(BENCH / "dying.py"), *SHAPE, *flags.split()]
        command += ["--transport", transport, "--out", folder, "--steps", str(steps), "--spares", str(spares)]
        command += (
            WIDE * settings.speed
            + ["--save-every", "1"] * (steps == STEPS)
            + ["--schedule", settings.schedule] * (stages > 1)
        )
        command += ["--repair", "exact" if settings.exact else "on"]
        environment = {**os.environ, "DEATHS": json.dumps(deaths), "LESSON": script}
        times, backs, told = dict[int, float](), list[float](), 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                told += line.count(" was terminated by ") + line.count(" failed: ")
                if line[0].isdigit():
                    times[int(line.split()[0])] = time.perf_counter()
                elif " is back" in line:
                    backs.append(time.perf_counter())
        if process.returncode:
            raise SystemExit(f"# {deaths}: the run ended with status {process.returncode}")
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    if told != len(deaths):
        raise SystemExit(f"# {deaths}: {told} were told")
    if [record["step"] for record in records] != list(range(steps)):
        raise SystemExit(f"# {deaths}: steps are missing")
    losses, speeds = ([record[name] for record in records] for name in ("loss", "tokens_per_second"))
    return Run(losses, speeds, [times[step] for step in range(steps)], backs)


def runs_of(settings: Settings) -> list[tuple[str, list[Death]]]:
    """Return the runs: the transport, and the two deaths of each."""
    _, _, (pipelines, stages, slices) = CASES[settings.case]
    ranks, found = pipelines * stages * slices, list[tuple[str, list[Death]]]()
    actions = 4 if stages == 1 else max(map(len, all_stages(settings.schedule, stages, 3)))
    points = range(0, actions + AFTER_ACTIONS, settings.every)
    places = itertools.product(points, range(ranks)) if settings.all_ranks else ((p, p % ranks) for p in points)
    for number, (point, rank) in enumerate(places):
        first, second = (settings.hows[(number + later) % len(settings.hows)] for later in (0, 1))
        deaths = [(rank, FIRST, point, first), ((rank + slices) % ranks, SECOND, point, second)]
        found.append((settings.transports[number % len(settings.transports)], deaths))
    return found


def farthest(losses: list[float], expected: list[float]) -> float:
    return max(abs(own - other) for own, other in zip(losses, expected, strict=True))


def compare(settings: Settings) -> None:
    if settings.report:
        report(read(settings.report))
    elif settings.spares:
        compare_long(settings)
    elif settings.speed:
        compare_speed(settings)
    else:
        compare_points(settings)


def compare_points(settings: Settings) -> None:
    what = {"case": settings.case, "schedule": settings.schedule * (settings.case != "dp"), "exact": settings.exact}
    known = [(*(one[name] for name in what), one["transport"], one["deaths"]) for one in read(settings.record)]
    wanted = [
        (way, deaths)
        for way, deaths in runs_of(settings)
        if (*what.values(), way, list(map(list, deaths))) not in known
    ]
    done = list[dict[str, Any]]()
    expected = run(settings, [], settings.transports[0]).losses if wanted else []
    for transport, deaths in each(wanted, "runs"):
        found = run(settings, deaths, transport)
        gaps = [end - start for start, end in itertools.pairwise(found.times)]
        # A death at a late point of a step delays the next one: its own line has been printed.
        late = [max(gaps[step - 1 : step + 1]) - statistics.median(gaps) for step in (FIRST, SECOND)]
        far = farthest(found.losses, expected)
        if far > (0 if settings.exact else ROUNDING):
            raise SystemExit(f"# {deaths}: the losses are {far:.1e} from those of the undisturbed run")
        done.append({**what, "transport": transport, "deaths": deaths, "late": late, "far": far})
        if settings.record:
            with settings.record.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
    report(done)


def read(path: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def report(runs: list[dict[str, Any]]) -> None:
    """Print a row for each case and schedule, and for each way to die; all steps had their losses."""
    rows = defaultdict[tuple[int, str], list[tuple[float, float]]](list)
    for one in runs:
        for (*_, how), late in zip(one["deaths"], one["late"], strict=True):
            what = f"{one['case']} {one['schedule']}".strip() + ", exact" * one["exact"]
            for row in enumerate((what, f"over {one['transport']}", how, "all")):
                rows[row].append((late, one["far"]))
    print("| deaths | number | late, median | late, worst | losses within |\n|---|---:|---:|---:|---:|")
    for (_, name), found in sorted(rows.items()):
        late, far = zip(*found, strict=True)
        print(f"| {name} | {len(late)} | {statistics.median(late):.2f} s | {max(late):.2f} s | {max(far):.0e} |")


def compare_long(settings: Settings) -> None:
    _, _, shape = CASES[settings.case]
    ranks, transport = math.prod(shape), settings.transports[0]
    deaths = [(number % ranks, (number + 1) * BETWEEN, number % 4, settings.hows[0]) for number in range(DEATHS)]
    usual = run(settings, [], transport, LONG)
    found = run(settings, deaths, transport, LONG, DEATHS * shape[-1])
    seconds = found.times[-1] - found.times[0], usual.times[-1] - usual.times[0]
    print(f"{DEATHS} deaths in {LONG} steps, {settings.case}: losses within {farthest(found.losses, usual.losses):.1e}")
    print(f"it took {seconds[0]:.1f} s, the undisturbed run {seconds[1]:.1f} s")
    late = [max(0.0, back - found.times[step]) for back, (_, step, *_) in zip(found.backs, deaths, strict=True)]
    after = f"{statistics.median(late):.2f} s (median), {max(late):.2f} s (worst)"
    print(f"spares were in place {after} after the end of the step in which a rank died")


def compare_speed(settings: Settings) -> None:
    half = STEPS_FOR_SPEED // 2
    found = run(settings, [(1, half, 1, settings.hows[0])], settings.transports[0], STEPS_FOR_SPEED)
    before, after = (statistics.median(found.speeds[start : start + half - 5]) for start in (5, half + 5))
    print(f"{settings.case}: {before:,.0f} tokens/s, after a death {after:,.0f}: {after / before:.2f} of it")


if __name__ == "__main__":
    command_line.run(compare, Settings, __doc__)
