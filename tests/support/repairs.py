"""Runs of scripts with `--repair`, whose ranks die at given points of a step (`bench/dying.py`)."""

import itertools
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

from support.chapters import FEW_TOKENS
from support.processes import LAB, Ended
from support.terminals import fork_launcher

SHAPE = [*"--data sample --dmodel 32 --num-heads 2 --seq-len 24 --device cpu --timeout 20".split(), *FEW_TOKENS]
STEPS, DIES_IN = 5, 2
Death = tuple[int, int, int, str]  # rank, step, point, how


def run_dying(deaths: Sequence[Death], lesson: str, *flags: object, **environment: str) -> Ended:
    """Run a script with these deaths. With WATCH, each rank looks at what it holds in each step, which takes time."""
    environment = {"WATCH": "False", **environment, "DEATHS": json.dumps(deaths), "LESSON": lesson}
    return fork_launcher(LAB / "bench/dying.py", *SHAPE, *flags, **environment).finish()


def run_with(
    deaths: Sequence[Death], out: Path, lesson: str, *flags: str, steps: int = STEPS, first: int = 0, **environment: str
) -> str:
    """Run a script with these deaths, from a first step on; return what it prints.

    Each step has to be recorded once, and at the end a rank has nothing but its connection to the store.
    """
    started = time.monotonic()
    ended = run_dying(deaths, lesson, *flags, "--out", out, **environment)
    run_seconds = time.monotonic() - started
    assert ended.status == 0, ended.err
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
    repairs = re.findall(r" with step \d+, (\S+) s after that was noticed$", ended.out, re.MULTILINE)
    assert repairs or all(step < 0 for _, step, *_ in deaths), "told, unless all ranks start again"
    assert all(0 <= float(seconds) <= run_seconds for seconds in repairs), (repairs, run_seconds)
    return ended.out
