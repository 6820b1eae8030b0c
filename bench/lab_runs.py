"""Runs of the lab's own commands, whose records a benchmark reads."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simplellm.errors import require

LAB = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 2


@dataclass
class Run:
    """What a run on a CPU, on generated stories, has left."""

    said: str
    records: list[dict[str, Any]]  # of its steps, as in metrics.jsonl
    memory: dict[str, int]  # rank 0's, by kind

    @property
    def seconds(self) -> list[float]:
        """Those of each step."""
        return [record["seconds"] for record in self.records]


def run(flags: str, checkout: Path = LAB) -> Run:
    """Run `./launch.sh` with these flags, in a checkout of the lab.

    Raises:
        InputError: it has failed.
    """
    with tempfile.TemporaryDirectory() as out:
        words = f"{flags} --data sample --device cpu --out {out}".split()
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        command = [sys.executable, "-m", "distlab.launch", *words]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=checkout, env=environment)
        require(ended.returncode == 0, f"{flags} failed: {ended.stderr[-300:]}")
        memory = Path(out, "memory.json")  # which early checkouts do not write
        records = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
        return Run(ended.stdout, records, json.loads(memory.read_text())[0] if memory.exists() else {})


def seconds_of_a_step(flags: str, checkout: Path = LAB) -> float:
    """The median step of one run, without the warm-up."""
    return statistics.median(run(flags, checkout).seconds[WARM_UP_STEPS:])
