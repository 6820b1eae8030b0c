"""The plain form of a lesson beside its fast form: whole runs, in turn, with the same flags.

    python bench/plain_and_fast.py                           5 rounds of every pair
    python bench/plain_and_fast.py --rounds 9 --pairs "tp, 2 ranks"

A round is a run of either, the plain one first in every second round. A run's time is the median of its steps, without
the first two; what is printed is the median over the rounds of how many times as fast the fast form is.
"""

from dataclasses import dataclass
from pathlib import Path

from lab_runs import seconds_of_a_step
from tables import compared, print_head, print_row
from turns import each, results_in_turn

from simplellm import command_line
from simplellm.errors import require

EXECUTOR = "PP/schedules/intro_PP_schedules.py --schedule dapple"
PAIRS = {  # the plain script, the fast one, the flags of both
    "dp-ga, 2 ranks": ("dp-ga", "dp-buckets", "--world-size 2 --batch-size 1 --steps 12"),
    "dp-ga, 3 ranks": ("dp-ga", "dp-buckets", "--world-size 3 --batch-size 1 --steps 12"),
    "dp-hooks, 2 ranks": ("dp-hooks", "mydp", "--world-size 2 --batch-size 1 --steps 12"),
    "pp-dapple, 2 stages": ("pp-dapple", EXECUTOR, "--world-size 2 --batch-size 4 --micro-batches 4 --steps 8"),
    "pp-dapple, 3 stages": ("pp-dapple", EXECUTOR, "--world-size 3 --batch-size 6 --micro-batches 6 --steps 8"),
    "tp, 2 ranks": ("tp", "tp-styles", "--world-size 2 --batch-size 2 --steps 8"),
    "hybrid-plain, 2 pipelines of 3 stages": ("hybrid-plain", "hybrid", "--steps 8"),
    "hybrid, 2 pipelines of 3 stages": ("hybrid", "5d", "--steps 8"),
}


@dataclass
class Settings:
    """What to compare."""

    rounds: int = 5
    """runs of each form"""
    pairs: tuple[str, ...] = tuple(PAIRS)
    """which pairs, by name"""


def compare(settings: Settings) -> None:
    """Print a row for each pair."""
    require(settings.rounds > 0, f"--rounds {settings.rounds}: give at least 1")
    for name in settings.pairs:
        require(name in PAIRS, f"--pairs {name}: give one of {'; '.join(PAIRS)}")
    print_head("plain form", "fast form", "ms a step, plain", "ms a step, fast", "times as fast (median)", "range")
    for name in each(settings.pairs, "pairs"):
        plain, fast, flags = PAIRS[name]
        works = {form: lambda flags, form=form: seconds_of_a_step(f"{form} {flags}") for form in (plain, fast)}
        seconds = results_in_turn(works, lambda _, flags=flags: flags, settings.rounds, 0)
        print_row(name, Path(fast.split()[0]).stem, *compared(seconds[plain], seconds[fast]))


if __name__ == "__main__":
    command_line.run(compare, Settings, __doc__)
