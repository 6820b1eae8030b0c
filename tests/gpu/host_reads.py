"""Trains as a chapter's script does, and prints where the host waits for the GPU within a step.

    python tests/gpu/host_reads.py primer/intro.py --clip-norm 0.3

CUDA warns of calls that wait for all work that the stream was given, such as `Tensor.item()`. It does not warn of waits
for an event, such as the one after a number's copy to the host.
"""

import runpy
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from distlab.run.training import TrainingRun

STEPS = TrainingRun.steps


def watched(run: TrainingRun[Any], stories: Any) -> Iterator[tuple[int, Tensor]]:
    """Iterate as `TrainingRun.steps` does; after each step, print the lines that made the host wait."""
    on_gpu = run.device.type == "cuda"
    for step, batch in STEPS(run, stories):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if on_gpu:
                torch.cuda.set_sync_debug_mode("warn")
            yield step, batch
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
        reads = [f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]
        print(f"# reads of step {step}:", *reads)


if __name__ == "__main__":
    TrainingRun.steps = watched  # type: ignore[method-assign, assignment]
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
