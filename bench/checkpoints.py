"""What saving costs: a run with --save-every 50 beside the same run without, in turns.

python bench/checkpoints.py
python bench/checkpoints.py --topologies primer --rounds 5
"""

import re
import statistics
import time
from dataclasses import dataclass

from lab_runs import run
from tables import print_head, print_row
from turns import each

from simplellm import command_line
from simplellm.errors import require


@dataclass
class Settings:
    topologies: tuple[str, ...] = ("primer", "hybrid")
    """names that launch.sh knows"""
    steps: int = 100
    """steps of a run"""
    save_every: int = 50
    """steps between two checkpoints"""
    rounds: int = 3
    """pairs of runs"""


def seconds_of(flags: str) -> tuple[float, float, float]:
    """Of the whole command, of its steps together, and of its checkpoints."""
    started = time.perf_counter()
    found = run(flags)
    whole = time.perf_counter() - started
    saving = re.search(r"checkpoints took ([\d.]+) s", found.said)
    return whole, sum(found.seconds), float(saving[1]) if saving else 0.0


def main(settings: Settings) -> None:
    require(settings.rounds > 0, f"--rounds {settings.rounds}: give at least 1")
    every = f"--save-every {settings.save_every}"
    heads = f"run of {settings.steps} steps", "seconds without", f"with {every}", "ratio", "saving, of the steps"
    print_head(*heads)
    for topology in each(settings.topologies, "topologies"):
        flags = f"{topology} --steps {settings.steps}"
        pairs = [(seconds_of(flags), seconds_of(f"{flags} {every}")) for _ in range(settings.rounds)]
        without, saving = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
        ratio = statistics.median(saving[0] / plain[0] for plain, saving in pairs)
        share = statistics.median(saved / training for _, (_, training, saved) in pairs)
        print_row(topology, f"{without:.1f}", f"{saving:.1f}", f"{ratio:.3f}", f"{100 * share:.1f} %")


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
