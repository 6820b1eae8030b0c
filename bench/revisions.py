"""Whole runs of this checkout beside those of another one, in turn: does a change make the code slower?

    git worktree add ../before main~10
    python bench/revisions.py ../before                      5 rounds of every run
    python bench/revisions.py ../before --rounds 9 --runs "dp-ga, 3 ranks"

A round is a run of either checkout, the other one first in every second round. A run's time is the median of its steps,
without the first two; what is printed is the median over the rounds of how many times as fast this checkout is.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from distlab.run.progress import each
from simplellm import command_line
from simplellm.errors import require

LAB = Path(__file__).resolve().parents[1]
# Scripts whose messages overlap: pp-dapple and tp are lessons that send plainly.
RUNS = {
    "primer": "primer --batch-size 3 --steps 12",
    "dp-ga, 2 ranks": "dp-ga --world-size 2 --batch-size 1 --steps 12",
    "dp-ga, 3 ranks": "dp-ga --world-size 3 --batch-size 1 --steps 12",
    "pp-dapple, 2 stages": "pp-zb --schedule dapple --world-size 2 --batch-size 4 --micro-batches 4 --steps 8",
    "pp-dapple, 3 stages": "pp-zb --schedule dapple --world-size 3 --batch-size 6 --micro-batches 6 --steps 8",
    "hybrid, 2 pipelines of 3 stages": "hybrid --steps 8",
    "a small model, 2 stages, gpipe": "pp-zb --schedule gpipe --world-size 2 --batch-size 12 --micro-batches 4 "
    "--dmodel 96 --num-heads 4 --seq-len 64 --steps 60",
    "a small model, 2 stages, dapple": "pp-zb --schedule dapple --world-size 2 --batch-size 12 --micro-batches 12 "
    "--dmodel 96 --num-heads 4 --seq-len 64 --steps 60",
    "dp-zero, 2 ranks": "dp-zero --world-size 2 --batch-size 1 --steps 10",
    "pp-zbv, 2 workers": "pp-zbv --world-size 2 --batch-size 4 --micro-batches 4 --steps 8",
    "tp, 2 ranks": "hybrid --dp 1 --pp 1 --tp 2 --batch-size 2 --micro-batches 1 --steps 8",
}
WARM_UP_STEPS = 2


@dataclass
class Settings:
    """What to compare."""

    other: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKOUT")]
    """folder of the other checkout"""
    rounds: int = 5
    """runs of each checkout"""
    runs: tuple[str, ...] = tuple(RUNS)
    """which runs, by name"""


def seconds_of_a_step(checkout: Path, flags: str) -> float:
    """The median step of one run."""
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "distlab.launch",
                *flags.split(),
                *f"--data sample --device cpu --out {out}".split(),
            ],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout / "src")},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        records = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["seconds"] for record in records[WARM_UP_STEPS:])


def compare(settings: Settings) -> None:
    """Print a row for each run."""
    other = settings.other.resolve()
    require((other / "src/distlab").is_dir(), f"{settings.other}: is no checkout of the lab; give its folder")
    require(settings.rounds > 0, f"--rounds {settings.rounds}: give at least 1")
    for name in settings.runs:
        require(name in RUNS, f"--runs {name}: give one of {', '.join(RUNS)}")
    print(
        "| run | ms a step, other | ms a step, this | times as fast (median) | range |\n|---|---|---|---|---|",
        flush=True,
    )
    for name in each(settings.runs, "runs"):
        seconds: dict[Path, list[float]] = {other: [], LAB: []}
        for number in range(settings.rounds):
            for checkout in (LAB, other) if number % 2 else (other, LAB):
                seconds[checkout].append(seconds_of_a_step(checkout, RUNS[name]))
        ratios = [before / now for before, now in zip(seconds[other], seconds[LAB], strict=True)]
        theirs, ours = (f"{statistics.median(seconds[checkout]) * 1e3:.0f}" for checkout in (other, LAB))
        range_ = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"| {name} | {theirs} | {ours} | {statistics.median(ratios):.3f} | {range_} |", flush=True)


if __name__ == "__main__":
    command_line.run(compare, Settings, __doc__)
