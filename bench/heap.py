"""One process: a training step with the heap of the lab's runs, and with heaps that the environment sets up.

    python bench/heap.py
    python bench/heap.py --batch-size 12 --steps 10

Each heap is that of a process of its own. The processes take turns; only one computes at a time.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from unittest.mock import patch

import torch
from single import ours, tokens
from tables import milliseconds, print_head, print_row
from turns import quartiles_of_ratios, require_quartiles, seconds_in_turn

from distlab.machine.heap import HEAP_VARIABLES, set_up_heap
from distlab.machine.processes import end_with_parent
from distlab.run.logs import peak_memory_bytes
from simplellm import command_line
from simplellm.errors import require

HEAPS = {  # environment variables, with which `set_up_heap` does nothing
    "glibc as it is": {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"},  # its default
    "glibc keeps what is freed": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
    "glibc requests huge pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "both": {"GLIBC_TUNABLES": f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={1 << 40}"},
    "as in the lab's runs": {},
}


@dataclass
class Settings:
    """What to measure."""

    batch_size: int = 4
    """sequences of 256 tokens"""
    steps: int = 20
    """measured steps with each heap"""


def train(pipe: Connection, batch_size: int) -> None:
    """Take a step for each turn that comes through the pipe, and send back the peak memory in MB."""
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    set_up_heap()
    step = ours(torch.float32)
    with suppress(EOFError):  # the other process has ended
        while True:
            step(tokens(pipe.recv(), batch_size))
            pipe.send(peak_memory_bytes(torch.device("cpu")) / 1e6)


def start(environment: dict[str, str], batch_size: int) -> Callable[[int], float]:
    """Start a process with these variables; returns a function that has it take a step and gives its peak memory."""
    here, there = multiprocessing.Pipe()
    others = {name: value for name, value in os.environ.items() if name not in (*HEAP_VARIABLES, "GLIBC_TUNABLES")}
    with patch.dict(os.environ, {**others, **environment}, clear=True):
        multiprocessing.get_context("spawn").Process(target=train, args=(there, batch_size), daemon=True).start()
    there.close()

    def step(turn: int) -> float:
        here.send(turn)
        return here.recv()

    return step


def main(settings: Settings) -> None:
    require_quartiles("--steps", settings.steps)
    require(settings.batch_size > 0, f"--batch-size {settings.batch_size}: give at least 1")
    steps = {name: start(environment, settings.batch_size) for name, environment in HEAPS.items()}
    seconds = seconds_in_turn(steps, int, settings.steps)
    print_head("heap", "step, ms:", "peak memory, MB:", "speed to glibc as it is (median):", "quartiles")
    first, *_ = seconds.values()
    for name, own in seconds.items():
        print_row(name, milliseconds(own), f"{steps[name](0):.0f}", *quartiles_of_ratios(first, own).cells(3))


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
