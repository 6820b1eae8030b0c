"""Runs of scripts with `--repair`, whose ranks die at given points of a step (`bench/dying.py`)."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from support.processes import LAB, children
from support.terminals import fork_launcher

SHAPE = "--data sample --dmodel 32 --num-heads 2 --seq-len 24 --device cpu --timeout 20".split()
STEPS, DIES_IN = 6, 2
Death = tuple[int, int, int, str]  # rank, step, point, how


def run_with(
    deaths: Sequence[Death],
    out: Path,
    lesson: str,
    *flags: str,
    steps: int = STEPS,
    first: int = 0,
    **environment: str,
) -> str:
    """Run a script with these deaths, from a first step on; return what it prints.

    Each step has to be recorded once, and at the end a rank has nothing but its connection to the store.
    """
    environment |= {"DEATHS": json.dumps(deaths), "LESSON": lesson}
    launcher = fork_launcher(LAB / "bench/dying.py", *SHAPE, *flags, "--out", out, **environment)
    ended = launcher.finish()
    assert ended.status == 0, ended.err
    assert not children(launcher.pid)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(steps)), "each step once"
    tokens = [0, *(record["tokens"] for record in records)][first:]
    assert len({after - before for before, after in itertools.pairwise(tokens)}) == 1, tokens
    held = [json.loads(file.read_text()) for file in out.glob("held*.json")]
    assert [each["has claimed"] for each in held if each["writes"]] == [True], "one rank has claimed the folder"
    ends = [each["at the end"] for each in held]
    assert [(end["descriptors"], end["threads"]) for end in ends] == [(1, 1)] * len(ends), ends
    printed = {line.partition(" ")[0] for line in ended.out.splitlines()}
    assert printed >= {str(step) for step in range(first, steps)}, "whichever rank prints them"
    return ended.out
