"""Two runs, one after the other, in one process: what the first has opened is closed."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chapters import MODEL, TRAINING, load, losses
from support.processes import LAB, free_port, run_ranks

from distlab.run.training import TrainingRun
from distlab.settings.common import parse


def train_often(rank: int, script: str, flags: list[str], outs: list[Path], ports: list[int]) -> list[dict[str, int]]:
    """Train once in each folder; what this process holds after each run."""
    held = []
    module, streams = load(script), (sys.stdout, sys.stderr)
    for out, port in zip(outs, ports, strict=True):
        own = [str(rank), *MODEL, *TRAINING, *flags, "--out", str(out), "--master-port", str(port)]
        run = TrainingRun(parse(module.DEFAULTS, "", own), LAB / script)
        assert torch.initial_seed() == run.settings.seed + rank, "each rank draws other numbers, as for dropout"
        module.train(run)
        run.close()
        del run
        gc.collect()  # a model and its hooks refer to each other
        assert (sys.stdout, sys.stderr) == streams
        maps = Path("/proc/self/maps").read_text()
        held.append(
            {
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "shared memory": maps.count("memfd:lab"),
            }
        )
    return held


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize(
    ("script", "world_size", "flags"),
    [
        ("primer/intro.py", 1, []),
        ("DP/gradient_aggr/intro_DP_GA.py", 3, ["--world-size", "3", "--transport", "gloo"]),
        ("hybrid/intro_hybrid.py", 4, "--dp 2 --pp 2 --tp 1 --transport shared".split()),
    ],
)
def test_the_second_run_is_the_first_again(script: str, world_size: int, flags: list[Any], tmp_path: Path) -> None:
    outs, ports = [tmp_path / name for name in "abc"], [free_port() for _ in range(3)]
    for first, second, third in run_ranks(world_size, train_often, script, flags, outs, ports, deadline=120):
        assert third == second, f"{first}: the first may have started what stays"
        assert third["shared memory"] == 0
    assert losses(outs[0]) == losses(outs[1]) == losses(outs[2])
    assert len(set(losses(outs[0]))) > 1
