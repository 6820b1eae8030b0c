"""Whole topologies on this machine's GPUs: what the tests in tests/gpu start, and what such a run leaves.

Each run is a command with processes of its own, as a user starts it: ranks cannot be forked from a process that has
initialized CUDA.

A rehearsal (LAB_GPU_REHEARSAL=n) runs the same tests on the CPU, as on a machine with n GPUs, and with gloo in place of
NCCL. It shows that the tests themselves work, and proves nothing about GPUs.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.checkpoints.models import read_model
from distlab.machine.devices import SHARE_GPUS
from support.chapters import State, initial_weights, losses, records, validation_losses
from support.processes import Ended, run

REHEARSAL = int(os.environ.get("LAB_GPU_REHEARSAL", "0"))  # how many GPUs to pretend
DEVICE = "cpu" if REHEARSAL else "cuda"
GPUS = REHEARSAL or torch.cuda.device_count()
HERE = f"{GPUS} GPU{'s' * (GPUS > 1)}"
NCCL = "gloo" if REHEARSAL else "nccl"

MODEL = "--dmodel 288 --num-heads 6 --n-layers 6 --seq-len 64"
TRAINING = f"{MODEL} --data sample --steps 6 --save-every 6 --optimizer sgd --lr 0.1"  # 6 sequences to a step in all
SAME = 1e-5  # relative difference of losses that float32's rounding may make, where sums have another order
NEAR = 2e-3  # the same for bfloat16
OF_WEIGHTS = {SAME: 0.01, NEAR: 0.1}  # the same of what a weight has learned; a gradient twice too large makes it 1
PATIENCE = 4 if REHEARSAL else 1  # a CPU may have few cores for many ranks
TIMEOUT, DEADLINE = 40 * PATIENCE, 120 * PATIENCE  # seconds: a rank's waits, and a whole run


def needs(gpus: int) -> pytest.MarkDecorator:
    """Skips a test where there are fewer GPUs."""
    return pytest.mark.skipif(gpus > GPUS, reason=f"needs {gpus} GPUs, and here {'are' if GPUS > 1 else 'is'} {GPUS}")


@dataclass
class GPURun:
    """What a run that has ended well left in its folder."""

    out: Path
    ended: Ended

    @property
    def losses(self) -> list[float]:
        return losses(self.out)

    @property
    def validation_losses(self) -> list[float]:
        return validation_losses(self.out)

    @property
    def records(self) -> list[dict[str, Any]]:
        return records(self.out)

    @property
    def weights(self) -> State:
        """Of the whole model after the last step, by name, on the CPU."""
        return read_model(self.out).parameters

    def checkpoint(self, step: int) -> Path:
        return self.out / "checkpoints" / f"step-{step:08}"


def command(line: str, *flags: str | Path, device: str = DEVICE) -> list[str | Path]:
    """What starts all ranks of a topology, `line` being its name and flags, as after ./launch.sh."""
    name, *own = line.split()
    launcher = [sys.executable, "-m", "distlab.launch", name]
    return [*launcher, *own, "--device", device, "--timeout", str(TIMEOUT), *flags]


def launch(line: str, out: Path, *flags: str | Path, device: str = DEVICE) -> GPURun:
    """Run a topology to its end.

    Raises:
        AssertionError: it failed, did not end by the deadline, or used another device or backend than it should have.
    """
    sharing: dict[str, Any] = {SHARE_GPUS: "1"}  # ranks of --backend nccl share GPUs if there are too few
    ended = run(*command(line, "--out", out, *flags, device=device), deadline=DEADLINE, **sharing)
    assert ended.status == 0, f"{line}:\n{ended.out}\n{ended.err}"
    assert "Traceback" not in ended.err, ended.err
    where = re.search(r"^# \w+: (?:one process|(\d+) ranks? over (\w+)) on (\w+)", ended.out, re.MULTILINE)
    assert where, ended.out
    assert where[3] == device
    if where[1]:
        asks_for_gloo = "--backend gloo" in line or "--all-reduce" in line  # by hand, the lab averages over gloo alone
        has_a_gpu_each = int(where[1]) <= GPUS and not asks_for_gloo
        by_nccl = device == "cuda" and (has_a_gpu_each or "--backend nccl" in line)
        assert where[2] == ("nccl" if by_nccl else "gloo")
    return GPURun(out, ended)


def train(line: str, out: Path, *flags: str | Path, device: str = DEVICE) -> GPURun:
    """Run a topology that trains the lab's Llama, by `TRAINING`; the flags in `line` come after it."""
    name, _, own = line.partition(" ")
    return launch(f"{name} {TRAINING} {own}", out, *flags, device=device)


def assert_trained_alike(own: GPURun, expected: GPURun, tolerance: float = SAME) -> None:
    """Two runs have the same losses and the same weights at the end, each of which training has changed.

    Losses alone do not show it: with TRAINING, a gradient of a norm's gain or of attention's queries that is twice too
    large changes no loss by 1e-5.
    """
    assert own.losses == pytest.approx(expected.losses, rel=tolerance)
    weights, expected_weights = own.weights, expected.weights
    assert weights.keys() == expected_weights.keys()
    for name, fresh in initial_weights(*MODEL.split()).items():
        learned = (expected_weights[name] - fresh).norm()
        assert learned > 0, name
        assert (weights[name] - expected_weights[name]).norm() < OF_WEIGHTS[tolerance] * learned, name
    shutil.rmtree(own.out / "checkpoints")  # they are large


def why_no_gpu() -> tuple[int, str]:
    """Exit status and sentence for a machine on which torch sees no GPU: 1 if the driver sees one, else 0."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        listed = ""
    nothing = "no GPU test was run, and nothing is proven"
    if not listed or "CUDA_VISIBLE_DEVICES" in os.environ:
        return 0, f"there is no GPU here (torch {torch.__version__} sees none): {nothing}"
    advice = "docs/gpu.md says which build of torch to install"
    mismatch = f"nvidia-smi lists {listed.splitlines()[0]}, but torch {torch.__version__} sees no GPU"
    return 1, f"{mismatch}: {nothing}; {advice}"
