"""Paths that cannot be used, in the place of every file or folder that a command takes."""

import contextlib
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

from support.bad_inputs.files import STORY, export, make_run, write
from support.bad_inputs.inputs import PYTHON, TINY, BadInput
from support.processes import LAB

# `{}` is the bad path; `{run}`, `{model}` and `{text}` are good ones, `{new}` is free. Without a Python file in front,
# the words are arguments of launch.sh.
READING = """
primer/intro.py TINY --data {}.txt
DP/gradient_aggr/intro_DP_GA.py 0 TINY --data {}.jsonl
hybrid/intro_hybrid.py 0 TINY --micro-batches 1 --data {}.parquet
primer/intro.py TINY --tokenizer {}
tp TINY --tokenizer {}
primer/intro.py TINY --resume {}
dp-zero TINY --resume {}
mlp --resume {}
sentiment --resume {}
TP/sentiment/tp_tensor_parallel.py 0 --device cpu --data {}
hybrid TINY --micro-batches 1 --machine {}
plan --machine {}
import {} {new}
export {} {new}
figures losses {new}.png {}
figures timelines {new}.png {}
figures memory {new}.png {}
figures holdings {new}.png {}
figures collectives {new}.png {}
tokenizer --data {}.txt --out {new}
check {}.py
{}.py
primer/tell_story.py {}
"""
WRITING = """
primer/intro.py TINY --out {}
DP/gradient_aggr/intro_DP_GA.py 0 TINY --out {}
hybrid TINY --micro-batches 1 --out {}
mlp --out {}
race --out {}
collectives --out {}
figures losses {}.png {run}
figures layout {}.svg
show-schedule dapple --png {}.png
import {model} {}
export {run} {}
tokenizer --data {text} --out {}
exercise mydp {}
calibrate {}
"""


def make_bad(folder: Path) -> list[str]:
    """Paths that a user may not use, or the system refuses."""
    folder.mkdir(parents=True)
    (folder / "locked").mkdir(mode=0)
    (folder / "loop").symlink_to("loop")
    write(folder / "file", STORY)
    below = [folder / name / "inside" for name in ("locked", "loop", "file")]
    return [*map(str, below), str(folder / ("long" * 75)), str(folder) + "/deep" * 900, os.fsdecode(b"no-utf8-\xff")]


def paths(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    bad = make_bad(folder / "bad")
    run = make_run(folder.parent / "whole")
    good = {
        "run": str(run),
        "model": str(export(run, folder / "model")),
        "text": str(write(folder / "story.txt", STORY)),
    }
    # Where a name that is not text may be that of a file of the user's, it is legal to write one.
    cases = [
        *itertools.product(READING.split("\n")[1:-1], bad),
        *itertools.product(WRITING.split("\n")[1:-1], bad[:-1]),
    ]
    chance.shuffle(cases)
    for number, (line, path) in enumerate(itertools.islice(itertools.cycle(cases), count)):
        words: list[str] = []
        for word in line.split():
            with contextlib.suppress(KeyError):
                word = word.format(path, new=folder / f"new-{number}", **good)
            words += TINY if word == "TINY" else [word]
        is_script = words[0].endswith(".py") and not line.startswith("{}")
        command = [PYTHON, str(LAB / words[0]), *words[1:]] if is_script else [str(LAB / "launch.sh"), *words]
        yield BadInput("paths", [command], ("UTF-8", "no-utf8") if path == bad[-1] else (path[:200],))
