"""What saving costs: a run with --save-every 50 beside the same run without, in turns.

python bench/checkpoints.py
python bench/checkpoints.py --topologies primer --rounds 5
"""

import json
import re
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from distlab.run.progress import each

LAB = Path(__file__).resolve().parents[1]


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


def run(topology: str, steps: int, *flags: str) -> tuple[float, float, float]:
    """Seconds of the whole command, of its steps together, and of its checkpoints."""
    with tempfile.TemporaryDirectory() as out:
        command: list[str | Path] = [LAB / "launch.sh", topology, *f"--steps {steps} --data sample --out {out}".split()]
        started = time.perf_counter()
        said = subprocess.run([*command, *flags], check=True, capture_output=True, text=True).stdout
        whole = time.perf_counter() - started
        records = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    saving = re.search(r"checkpoints took ([\d.]+) s", said)
    return whole, sum(record["seconds"] for record in records), float(saving[1]) if saving else 0.0


def main(settings: Settings) -> None:
    steps, every = settings.steps, settings.save_every
    print(f"| run of {steps} steps | seconds without | with --save-every {every} | ratio | saving, of the steps |")
    print("|---|---|---|---|---|")
    for topology in each(settings.topologies, "topologies"):
        pairs = [
            (run(topology, steps), run(topology, steps, "--save-every", str(every))) for _ in range(settings.rounds)
        ]
        without, saving = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
        ratio = statistics.median(saving[0] / plain[0] for plain, saving in pairs)
        share = statistics.median(saved / training for _, (_, training, saved) in pairs)
        print(f"| {topology} | {without:.1f} | {saving:.1f} | {ratio:.3f} | {100 * share:.1f} % |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
