"""Kills ranks at every point of a step (see `dying.py`), and checks that the run goes on.

    python bench/repairs.py                                       dp-repair: each point of a step in turn
    python bench/repairs.py --case 2x3 --schedule zb-h1 --record runs/deaths.jsonl
    python bench/repairs.py --report runs/deaths.jsonl            a table of all recorded runs
    python bench/repairs.py --case 2x3 --spares                   20 deaths in one exact run of 200 steps
    python bench/repairs.py --case 2x3 --speed                    tokens/s before and after a death

In each run one rank dies, and three steps later another, which holds other layers where ranks hold different ones. Each
step must have its loss, equal to rounding to that of the undisturbed run; no process may be left, and at its end no
rank may hold more descriptors, mappings or threads than in the undisturbed run. Every second pair of runs has
`--repair exact`, and must have the same losses bit for bit. Printed is how much later than usual the step after a death
was complete. A run that fails is reported, and the others go on; the status is then 1. With `--record`, runs that the
file already has are left out.
"""

import ctypes
import functools
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tables import print_head, print_row
from turns import each

from distlab.pipeline.schedules import all_stages
from simplellm import command_line

BENCH = Path(__file__).resolve().parent
STEPS, FIRST, SECOND = 10, 3, 6
LONG, DEATHS, BETWEEN = 200, 20, 9  # a run with spares: its steps, its deaths, and the steps between two of these
STEPS_FOR_SPEED, ROUNDS = 40, 3  # a rank dies in the middle
SECONDS_OF_A_RUN = 150  # at most, of one with 10 steps
PR_SET_CHILD_SUBREAPER = 36  # of Linux: orphans become children of this process
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
    run_on: bool = False
    """--run-on: no rank waits for the loss of a step"""
    exact: bool = False
    """--repair exact in all runs: the losses have to be the same bit for bit"""
    cores: int = 0
    """plan detours for this number of cores, instead of those that are here: with enough, backward passes are split"""
    record: Path | None = None
    """file to add each run to"""
    report: Path | None = None
    """print a table of the runs in this file, and run nothing"""
    spares: bool = False
    """one long run instead, which is exact, and in which spares take the places of the dead"""
    speed: bool = False
    """one run instead, with its speed before and after a death"""


class FailedError(Exception):
    """A run that is not the run it should be."""


@dataclass
class Run:
    losses: list[float]
    speeds: list[float]  # tokens/s, by step
    times: list[float]  # when the line of each step was printed
    backs: list[float]  # when it was printed that ranks are back
    held: dict[int, dict[str, Any]]  # by rank that was there at the end: what it held (`dying.held`)


def run(
    settings: Settings, deaths: list[Death], transport: str, exact: bool, steps: int = STEPS, spares: int = 0
) -> Run:
    """Run the ranks, which die these deaths; `FailedError` if they do not, or a step is missing or a process left."""
    script, flags, (pipelines, stages, slices) = CASES[settings.case]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "distlab.launch", str(BENCH / "dying.py"), *SHAPE, *flags.split()]
        command += ["--transport", transport, "--out", name, "--steps", str(steps), "--spares", str(spares)]
        command += (
            WIDE * settings.speed
            + ["--save-every", "1"] * (steps == STEPS and not settings.run_on)  # ranks wait before they save
            + ["--schedule", settings.schedule] * (stages > 1)
        )
        command += ["--repair", "exact" if exact else "on", *["--run-on"] * settings.run_on]
        environment = {**os.environ, "DEATHS": json.dumps(deaths), "LESSON": script, "WATCH": str(not settings.speed)}
        environment |= {"CORES": str(settings.cores)} if settings.cores else {}
        times, backs, told, last = dict[int, float](), list[float](), 0, ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            watchdog = threading.Timer(SECONDS_OF_A_RUN * steps / STEPS, process.kill)
            watchdog.start()
            for line in process.stdout:
                told, last = told + line.count(" was terminated by ") + line.count(" failed: "), line.strip()
                if line[0].isdigit():
                    step = int(line.split()[0])
                    if not (settings.run_on and step in times):  # a new writer prints the last one again
                        times[step] = time.perf_counter()
                elif " is back" in line:
                    backs.append(time.perf_counter())
            watchdog.cancel()
        left = end_orphans()
        expect(not process.returncode, f"the run ended with status {process.returncode}: {last}")
        expect(not left, f"processes left behind: {', '.join(left)}")
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        ranks = range(pipelines * stages * slices)
        files = {rank: folder / f"held{rank}.json" for rank in ranks}
        held = {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}
    expect(told == len(deaths), f"{told} deaths were told")
    expect([record["step"] for record in records] == list(range(steps)), "steps are missing")
    losses, speeds = ([record[name] for record in records] for name in ("loss", "tokens_per_second"))
    return Run(losses, speeds, [times[step] for step in range(steps)], backs, held)


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise FailedError(otherwise)


def end_orphans() -> list[str]:
    """Kill the processes that a run has left, which are now this one's children, and return their names."""
    names = []
    for threads in Path("/proc/self/task").glob("*/children"):
        for process in map(int, threads.read_text().split()):
            names.append(Path(f"/proc/{process}/comm").read_text().strip())
            os.kill(process, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(process, 0)
    return names


def check_held(before: Mapping[str, int], after: Mapping[str, int], who: str) -> None:
    """Raise `FailedError` if there is more of something than before."""
    more = [f"{after[name]} {name} instead of {before[name]}" for name in before if after[name] > before[name]]
    expect(not more, f"{who} {', '.join(more)}")


def runs_of(settings: Settings) -> list[tuple[str, bool, list[Death]]]:
    """Return the runs: the transport, whether they are exact, and the two deaths of each."""
    _, _, (pipelines, stages, slices) = CASES[settings.case]
    ranks, found = pipelines * stages * slices, list[tuple[str, bool, list[Death]]]()
    programs = [] if stages == 1 else all_stages(settings.schedule, stages, 3)
    actions = max(map(len, programs), default=4)
    unsplit = min((2 * sum(action.letter == "F" for action in program) for program in programs), default=actions)
    after = AFTER_ACTIONS - 2 * settings.run_on  # without those of a checkpoint
    points = range(0, actions + after, settings.every)
    for number, point in enumerate(points):
        first, second = (settings.hows[(number + more) % len(settings.hows)] for more in (0, 1))
        later = point if point < unsplit + after else point - (actions - unsplit)
        deaths = [(number % ranks, FIRST, point, first), ((number + slices) % ranks, SECOND, later, second)]
        turn, way = divmod(number, len(settings.transports))
        found.append((settings.transports[way], settings.exact or bool(turn % 2), deaths))
    return found


def farthest(losses: list[float], expected: list[float]) -> float:
    return max(abs(own - other) for own, other in zip(losses, expected, strict=True))


def compare(settings: Settings) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if settings.report:
        report(read(settings.report))
        return
    work = compare_long if settings.spares else compare_speed if settings.speed else compare_points
    try:
        work(settings)
    except FailedError as error:
        raise SystemExit(f"# {error}") from None


def compare_points(settings: Settings) -> None:
    schedule = f"{settings.schedule}, {settings.cores} cores" if settings.cores else settings.schedule
    case = settings.case + ", run-on" * settings.run_on
    of_case = {"case": case, "schedule": schedule * (settings.case != "dp")}
    known, done = read(settings.record), list[dict[str, Any]]()
    undisturbed = functools.cache(lambda transport, exact: run(settings, [], transport, exact))
    for transport, exact, deaths in each(runs_of(settings), "runs"):
        one = {**of_case, "exact": exact, "transport": transport, "deaths": [list(death) for death in deaths]}
        if any(one.items() <= other.items() for other in known):
            continue
        done.append(one)
        try:
            one |= measure(settings, deaths, transport, exact, undisturbed(transport, exact))
        except FailedError as error:
            one |= {"failed": str(error)}
            print(f"# {transport}, {deaths}: {error}", flush=True)
        if settings.record:
            with settings.record.open("a") as file:
                file.write(json.dumps(one) + "\n")
    report(done)


def measure(settings: Settings, deaths: list[Death], transport: str, exact: bool, usual: Run) -> dict[str, Any]:
    """Return how late the step after each death was, and how far the losses are from those of the undisturbed run."""
    found = run(settings, deaths, transport, exact)
    gaps = [end - start for start, end in itertools.pairwise(found.times)]
    # A death at a late point of a step delays the next one: its own line has been printed.
    late = [max(gaps[step - 1 - settings.run_on : step + 1]) - statistics.median(gaps) for step in (FIRST, SECOND)]
    far = farthest(found.losses, usual.losses)
    expect(far <= (0 if exact else ROUNDING), f"the losses are {far:.1e} from those of the undisturbed run")
    for rank, held in found.held.items():
        check_held(usual.held[rank]["at the end"], held["at the end"], f"rank {rank} has")
    return {"late": late, "far": far}


def read(path: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def report(runs: Sequence[dict[str, Any]]) -> None:
    """Print a row for each case and schedule, each transport, and each way to die; exit with status 1 if a run failed.

    All steps of the other runs had their losses, and nothing was left behind.
    """
    rows = defaultdict[tuple[int, str], list[tuple[dict[str, Any], int]]](list)
    for one in runs:
        what = f"{one['case']} {one['schedule']}".strip() + ", exact" * one["exact"]
        for number, (*_, how) in enumerate(one["deaths"]):
            for row in enumerate((what, one["transport"], how, "all")):
                rows[row].append((one, number))
    print_head("deaths", "runs:", "failed:", "deaths:", "late, median:", "late, worst:", "losses within:")
    for (_, name), found in sorted(rows.items(), key=lambda row: row[0]):
        of = {id(one): one for one, _ in found}.values()
        good = [(one["late"][number], one["far"]) for one, number in found if "failed" not in one]
        failed, times = sum("failed" in one for one in of), ("", "", "")
        if good:
            late, far = zip(*good, strict=True)
            times = f"{statistics.median(late):.2f} s", f"{max(late):.2f} s", f"{max(far):.0e}"
        print_row(name, len(of), failed, len(found), *times)
    failed = sum("failed" in one for one in runs)
    if failed:
        raise SystemExit(f"# {failed} of {len(runs)} runs failed")


def compare_long(settings: Settings) -> None:
    _, _, shape = CASES[settings.case]
    ranks, transport = math.prod(shape), settings.transports[0]
    deaths = [(number % ranks, (number + 1) * BETWEEN, number % 4, settings.hows[0]) for number in range(DEATHS)]
    # Differences by rounding grow from step to step, so only an exact run has the same losses to its end.
    usual = run(settings, [], transport, True, LONG)
    found = run(settings, deaths, transport, True, LONG, DEATHS * shape[-1])
    expect(found.losses == usual.losses, "the losses are not those of the undisturbed run")
    # All ranks are there again. Which one of a group has most pipes depends on which is there longest.
    totals = [
        sum((Counter(held["steps"][str(LONG - 1)]) for held in of.held.values()), Counter()) for of in (usual, found)
    ]
    check_held(totals[0], totals[1], "the ranks together have")
    seconds = found.times[-1] - found.times[0], usual.times[-1] - usual.times[0]
    print(f"{DEATHS} deaths in {LONG} steps, {settings.case}: the same losses, bit for bit")
    print(f"it took {seconds[0]:.1f} s, the undisturbed run {seconds[1]:.1f} s")
    late = [max(0.0, back - found.times[step]) for back, (_, step, *_) in zip(found.backs, deaths, strict=True)]
    after = f"{statistics.median(late):.2f} s (median), {max(late):.2f} s (worst)"
    print(f"spares were in place {after} after the end of the step in which a rank died")


def compare_speed(settings: Settings) -> None:
    half, ratios = STEPS_FOR_SPEED // 2, list[float]()
    for _ in range(ROUNDS):
        deaths = [(1, half, 1, settings.hows[0])]
        found = run(settings, deaths, settings.transports[0], settings.exact, STEPS_FOR_SPEED)
        before, after = (statistics.median(found.speeds[start : start + half - 5]) for start in (5, half + 5))
        ratios.append(after / before)
        speeds = f"{before:,.0f} tokens/s, after a death {after:,.0f}"
        print(f"{settings.case}: {speeds}: {ratios[-1]:.2f} of it", flush=True)
    print(f"{settings.case}: {statistics.median(ratios):.2f} (median)")


if __name__ == "__main__":
    command_line.run(compare, Settings, __doc__)
