"""How long sequences may be where ranks share them: memory beside the formula, bytes of each way, the longest context.

python bench/long_context.py                        three tables; some five minutes
python bench/long_context.py --budget-mb 1500       more memory for each rank

Each number is of a run of CP/intro_CP_ring.py with the default model and one sequence. A rank's memory is the peak that
Linux recorded for its process; all ranks hold as much.
"""

from dataclasses import dataclass
from typing import get_args

from lab_runs import LAB, Run, run
from tables import print_head, print_row

from distlab.parallel.options import CPKind
from distlab_planner.costs import Costs
from distlab_planner.layouts import RunLayout
from distlab_planner.machine import read_machine
from distlab_planner.memory import held
from distlab_planner.model import Model, Sizes
from distlab_planner.sent import sent_in_step
from simplellm import command_line
from simplellm.tokenizers import SPTokenizer

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


def run_with(ranks: int, seq_len: int, kind: CPKind = "ring") -> Run:
    """Train for two steps."""
    return run(f"cp-ring --world-size {ranks} --seq-len {seq_len} --cp-kind {kind} --batch-size 1 --steps 2")


def costs(ranks: int, seq_len: int, kind: CPKind = "ring") -> Costs:
    """Return what the planner knows of such a run."""
    model = Model(Sizes(288, 6, 6, 4 * 288, seq_len, SPTokenizer().vocab_size), n_layers=6)
    return Costs(MACHINE, model, RunLayout({"cp": ranks}, 1, 1, "dapple", "none", "none", (6,), kind))


def memory(settings: Settings) -> None:
    print_head("tokens:", "ranks:", "activations of a rank, MB:", "by the formula:", "peak of its process, MB:")
    for seq_len in settings.seq_len:
        for ranks in settings.ranks:
            found, formula = run_with(ranks, seq_len), held(costs(ranks, seq_len), 0).activations
            activations = (f"{number / 1e6:,.2f}" for number in (found.memory["activations"], formula))
            print_row(f"{seq_len:,}", ranks, *activations, f"{found.records[-1]['peak_memory_bytes'] / 1e6:,.0f}")


def sent(settings: Settings) -> None:
    print()
    print_head("ranks:", "way", "sent by a rank in a step, bytes:", "by the formula:")
    for ranks in settings.ranks:
        for kind in get_args(CPKind):
            known = costs(ranks, 1024, kind)
            if ranks == 1 or (kind == "heads" and known.model.sizes.num_heads % ranks):
                continue
            formula = sum(one.bytes for (name, _), one in sent_in_step(known, 0).items() if name in OF_SEQUENCES)
            sent_bytes = run_with(ranks, 1024, kind).records[-1]["sent_bytes"]
            counted = sum(sent_bytes.get(name, 0) for name in OF_SEQUENCES)
            print_row(ranks, kind, f"{counted:,}", f"{formula:,.0f}")


def longest(settings: Settings) -> None:
    print()
    print_head("ranks:", f"tokens with {settings.budget_mb:,} MB for each rank:", "peak, MB:")
    for ranks in settings.ranks:
        fits, peak, too_long = 0, 0, 0
        length = 4 * settings.apart * ranks
        while not too_long or too_long - fits > settings.apart:
            reached = run_with(ranks, length).records[-1]["peak_memory_bytes"]
            if reached <= settings.budget_mb * 1e6:
                fits, peak = length, reached
            else:
                too_long = length
            length = (fits + too_long) // 2 // settings.apart * settings.apart if too_long else 2 * length
        print_row(ranks, f"{fits:,}", f"{peak / 1e6:,.0f}")


def main(settings: Settings) -> None:
    for table in (memory, sent, longest):
        table(settings)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
