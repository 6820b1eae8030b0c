"""Whole runs of this checkout beside those of another one, in turn: does a change make the code slower?

    git worktree add ../before main~10
    python bench/revisions.py ../before                      5 rounds of every run
    python bench/revisions.py ../before --rounds 9 --runs "dp-ga, 3 ranks"

A round is a run of either checkout, the other one first in every second round. A run's time is the median of its steps,
without the first two; what is printed is the median over the rounds of how many times as fast this checkout is.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from lab_runs import LAB, seconds_of_a_step
from tables import compared, print_head, print_row
from turns import each, results_in_turn

from simplellm import command_line
from simplellm.errors import require

# pp-dapple and tp are lessons that send plainly: their fast forms are pp-zb, and hybrid and tp-styles.
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
    "dp-buckets, 2 ranks": "dp-buckets --world-size 2 --batch-size 1 --steps 12",
    "dp-buckets, 3 ranks": "dp-buckets --world-size 3 --batch-size 1 --steps 12",
    "dp-zero, 2 ranks": "dp-zero --world-size 2 --batch-size 1 --steps 10",
    "pp-zbv, 2 workers": "pp-zbv --world-size 2 --batch-size 4 --micro-batches 4 --steps 8",
    "tp, 2 ranks": "hybrid --dp 1 --pp 1 --tp 2 --batch-size 2 --micro-batches 1 --steps 8",
    "tp-styles, 2 ranks": "tp-styles --world-size 2 --batch-size 2 --steps 8",
}
# Fast forms that checkouts without these files have under the name of the lesson.
BEFORE = {"dp-buckets": ("DP/buckets/intro_DP_buckets.py", "dp-ga"), "tp-styles": ("TP/intro_TP_styles.py", "tp")}


@dataclass
class Settings:
    """What to compare."""

    other: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKOUT")]
    """folder of the other checkout"""
    rounds: int = 5
    """runs of each checkout"""
    runs: tuple[str, ...] = tuple(RUNS)
    """which runs, by name"""


def compare(settings: Settings) -> None:
    """Print a row for each run."""
    other = settings.other.resolve()
    require((other / "src/distlab").is_dir(), f"{settings.other}: is no checkout of the lab; give its folder")
    require(settings.rounds > 0, f"--rounds {settings.rounds}: give at least 1")
    for name in settings.runs:
        require(name in RUNS, f"--runs {name}: give one of {'; '.join(RUNS)}")
    print_head("run", "ms a step, other", "ms a step, this", "times as fast (median)", "range")
    works = {checkout: partial(seconds_in, checkout) for checkout in (other, LAB)}
    for name in each(settings.runs, "runs"):
        seconds = results_in_turn(works, lambda _, flags=RUNS[name]: flags, settings.rounds, 0)
        print_row(name, *compared(seconds[other], seconds[LAB]))


def seconds_in(checkout: Path, flags: str) -> float:
    """The median step of a run in a checkout, which may have the script under another name."""
    name, *rest = flags.split()
    file, before = BEFORE.get(name, ("", ""))
    words = [name if (checkout / file).exists() else before, *rest]
    return seconds_of_a_step(" ".join(words), checkout)


if __name__ == "__main__":
    command_line.run(compare, Settings, __doc__)
