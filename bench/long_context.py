"""How long sequences may be where ranks share them: memory beside the formula, bytes of each way, the longest context.

python bench/long_context.py                        three tables; some five minutes
python bench/long_context.py --budget-mb 1500       more memory for each rank

Each number is of a run of CP/intro_CP_ring.py with the default model and one sequence. A rank's memory is the peak that
Linux recorded for its process; all ranks hold as much.
"""

import json
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import tyro

from distlab.parallel.division import Kind
from distlab.run.commands import lab_command
from distlab_planner.costs import Costs
from distlab_planner.layouts import RunLayout
from distlab_planner.machine import read_machine
from distlab_planner.memory import held
from distlab_planner.model import Model, Sizes
from distlab_planner.sent import sent_in_step
from simplellm.tokenizers import SPTokenizer

LAB = Path(__file__).resolve().parents[1]
MACHINE = read_machine(LAB / "docs/machines/cluster.json")  # its speed has no effect on bytes
OF_SEQUENCES = "keys and values", "gradients of keys and values", "heads"  # kinds of the ledger


@dataclass
class Settings:
    """What to measure."""

    ranks: tuple[int, ...] = (1, 2, 4)
    """numbers of ranks"""
    seq_len: tuple[int, ...] = (1024, 2048, 4096)
    """lengths of the sequence in the table of memory"""
    budget_mb: int = 1000
    """memory of each rank in the table of the longest context"""
    apart: int = 512
    """the longest context is found to this number of tokens"""


def run(ranks: int, seq_len: int, kind: Kind = "ring") -> tuple[dict[str, Any], dict[str, int]]:
    """Train for two steps; return rank 0's last record and its memory by kind."""
    with tempfile.TemporaryDirectory() as out:
        flags = f"cp-ring --world-size {ranks} --seq-len {seq_len} --cp-kind {kind} --batch-size 1 --steps 2"
        command = lab_command(*flags.split(), "--data", "sample", "--device", "cpu", "--out", out)
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"{shlex.join(command)} failed: {ended.stderr[-300:]}")
        *_, last = (Path(out) / "metrics.jsonl").read_text().splitlines()
        return json.loads(last), json.loads((Path(out) / "memory.json").read_text())[0]


def costs(ranks: int, seq_len: int, kind: Kind = "ring") -> Costs:
    """Return what the planner knows of such a run."""
    model = Model(Sizes(288, 6, 6, 4 * 288, seq_len, SPTokenizer().vocab_size), n_layers=6)
    return Costs(MACHINE, model, RunLayout({"cp": ranks}, 1, 1, "dapple", "none", "none", (6,), kind))


def memory(settings: Settings) -> None:
    print("| tokens | ranks | activations of a rank, MB | by the formula | peak of its process, MB |")
    print("|---:|---:|---:|---:|---:|")
    for seq_len in settings.seq_len:
        for ranks in settings.ranks:
            last, counted = run(ranks, seq_len)
            numbers = counted["activations"], held(costs(ranks, seq_len), 0).activations, last["peak_memory_bytes"]
            cells = " | ".join(f"{number / 1e6:,.2f}" for number in numbers[:2])
            print(f"| {seq_len:,} | {ranks} | {cells} | {numbers[2] / 1e6:,.0f} |", flush=True)


def sent(settings: Settings) -> None:
    print("\n| ranks | way | sent by a rank in a step, bytes | by the formula |", "|---:|---|---:|---:|", sep="\n")
    for ranks in settings.ranks:
        for kind in get_args(Kind):
            known = costs(ranks, 1024, kind)
            if ranks == 1 or (kind == "heads" and known.model.sizes.num_heads % ranks):
                continue
            formula = sum(one.bytes for (name, _), one in sent_in_step(known, 0).items() if name in OF_SEQUENCES)
            counted = sum(run(ranks, 1024, kind)[0]["sent_bytes"].get(name, 0) for name in OF_SEQUENCES)
            print(f"| {ranks} | {kind} | {counted:,} | {formula:,.0f} |", flush=True)


def longest(settings: Settings) -> None:
    print(f"\n| ranks | tokens with {settings.budget_mb:,} MB for each rank | peak, MB |", "|---:|---:|---:|", sep="\n")
    for ranks in settings.ranks:
        fits, peak, too_long = 0, 0, 0
        length = 4 * settings.apart * ranks
        while not too_long or too_long - fits > settings.apart:
            reached = run(ranks, length)[0]["peak_memory_bytes"]
            if reached <= settings.budget_mb * 1e6:
                fits, peak = length, reached
            else:
                too_long = length
            length = (fits + too_long) // 2 // settings.apart * settings.apart if too_long else 2 * length
        print(f"| {ranks} | {fits:,} | {peak / 1e6:,.0f} |", flush=True)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    for table in (memory, sent, longest):
        table(settings)


if __name__ == "__main__":
    main()
