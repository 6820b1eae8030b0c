"""Records of runs, of tensors that are written by hand."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from distlab.run.recording import file_of

ONE_PROCESS: dict[str, Any] = {"layout": {}}  # what a run of one process has at least in config.json
SHAPE = 4, 2  # of a tensor; two ranks hold two rows each


def configure(run: Path, layout: Mapping[str, int] = {}, settings: Mapping[str, Any] = {}, **more: Any) -> None:
    """Write a run's config.json."""
    config = {"settings": settings, "layout": layout, "world_size": prod(layout.values()), **more}
    (run / "config.json").write_text(json.dumps(config))


def record(
    run: Path, rank: int, tensors: dict[str, Tensor], start: int = 0, rows: int = SHAPE[0], step: int = 0
) -> None:
    """Write a rank's rows of some tensors in a step."""
    path, own = file_of(run, step, rank), slice(start, start + rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = dict.fromkeys(tensors, (SHAPE, [([start, 0], [rows, SHAPE[1]])]))
    kept = {name: tensor[own].flatten().clone() for name, tensor in tensors.items()}
    save_file(kept, path, metadata={"parts": json.dumps(parts)})
