"""Records of runs, of tensors that are written by hand."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from distlab.run.recording import file_of

ONE_PROCESS: dict[str, Any] = {"layout": {}}  # what a run of one process has at least in config.json
SHAPE = 4, 2  # of a tensor; two ranks hold two rows each


def record(
    run: Path, rank: int, tensors: dict[str, Tensor], start: int = 0, rows: int = SHAPE[0], step: int = 0
) -> None:
    """Write a rank's rows of some tensors in a step."""
    path, own = file_of(run, step, rank), slice(start, start + rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = dict.fromkeys(tensors, (SHAPE, [([start, 0], [rows, SHAPE[1]])]))
    kept = {name: tensor[own].flatten().clone() for name, tensor in tensors.items()}
    save_file(kept, path, metadata={"parts": json.dumps(parts)})
