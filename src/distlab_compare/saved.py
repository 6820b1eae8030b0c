"""The first checkpoint in which two runs diverge; a checkpoint has each tensor once, whichever ranks held it."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.checkpoints.format import Checkpoint, valid
from distlab.checkpoints.saving import OPTIMIZER, is_of_model, read_into, tensors_in
from distlab_compare import mistakes
from distlab_compare.differences import LATER, ROUNDING, and_others, distance, is_unsure
from simplellm.errors import require

MOMENT = "exp_avg"  # Adam's moving average of the gradients: as wrong as they are


class Saved:
    """A checkpoint's tensors, read when they are needed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._tensors: dict[str, Tensor] = {}

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        tensors = tensors_in(self.checkpoint.folder).items()
        return {name: about for name, about in tensors if name.startswith(OPTIMIZER) or is_of_model(name)}

    @property
    def parameters(self) -> list[str]:
        names = filter(is_of_model, self._metadata)
        return sorted(names, key=lambda name: [part.zfill(9) for part in re.split(r"(\d+)", name)])

    def __contains__(self, name: str) -> bool:
        return name in self._metadata

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor as float32."""
        if not self._tensors:  # all at once: torch reads the headers of all files each time
            tensors = {
                key: torch.empty(about.size, dtype=about.properties.dtype) for key, about in self._metadata.items()
            }
            read_into(tensors, self.checkpoint)
            self._tensors = {key: tensor.float() for key, tensor in tensors.items()}
        return self._tensors[name]

    def writers(self, name: str, wrong: Tensor) -> list[int]:
        """Return the ranks that wrote the elements of a tensor that are `wrong`."""
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        storage = HuggingFaceStorageReader(str(self.checkpoint.folder)).read_metadata().storage_data
        found = set()
        for index, info in storage.items():
            if index.fqn != name or not (number := re.search(r"shard-(\d+)-", info.relative_path)):
                continue
            start = [*(index.offset or [0] * wrong.dim())]
            chunk = next(c for c in self._metadata[name].chunks if [*c.offsets] == start)
            if wrong[tuple(slice(a, a + size) for a, size in zip(start, chunk.sizes, strict=True))].any():
                found.add(int(number[1]) - 1)
        return sorted(found)


def by_step(run: Path) -> Mapping[int, Saved]:
    """Return a run's intact checkpoints by their steps, in order; none if it has none."""
    found = {checkpoint.step: Saved(checkpoint) for checkpoint in valid(run)}
    return dict(sorted(found.items()))


def first_divergence(
    own: Mapping[int, Saved], right: Mapping[int, Saved], steps: Sequence[int], tolerance: float
) -> list[str]:
    """Return sentences about the first of some steps whose checkpoints differ; none if all are equal.

    Adam's moments come before the weights, because they are as wrong as the gradients. The weights of elements whose
    gradients are only rounding count as equal. With Adam, which makes rounding larger, the tolerance is also larger.
    """
    before: int | None = None
    unsure: dict[str, Tensor] = {}
    for step in steps:
        mine, others = own[step], right[step]
        names = others.parameters
        for name in names:
            is_same = name in mine and mine[name].shape == others[name].shape
            require(is_same, f"{mine.checkpoint.folder}: its model has no {name} of {[*others[name].shape]}")
        moments = {name: f"{OPTIMIZER}{name}.{MOMENT}" for name in names}
        moments = {name: key for name, key in moments.items() if key in mine and key in others}
        loose = tolerance * (LATER if moments else 1)
        floor = ROUNDING * sum(float(others[key].norm()) ** 2 for key in moments.values()) ** 0.5
        wrong = [name for name, key in moments.items() if mistakes.differs(mine[key], others[key], loose, floor)]
        if wrong:
            return [_sentence(step, "the mean gradients of", wrong, moments, mine, others)]
        for name, key in moments.items():
            now = is_unsure(mine[key], others[key], tolerance)
            unsure[name] = now | unsure.get(name, torch.zeros_like(now))
        wrong = [name for name in names if mistakes.differs(*_sure(mine[name], others[name], unsure.get(name)), loose)]
        if wrong:
            changed = "" if before is None else _changed(wrong[0], mine, others, own[before], right[before])
            return [_sentence(step, "the weights", wrong, {}, mine, others) + changed]
        before = step
    return []


def _sure(own: Tensor, right: Tensor, unsure: Tensor | None) -> tuple[Tensor, Tensor]:
    return (own, right) if unsure is None else (own[~unsure], right[~unsure])


def _sentence(step: int, what: str, wrong: Sequence[str], keys: Mapping[str, str], own: Saved, right: Saved) -> str:
    """Return a sentence about the first of some wrong parameters; `keys` are the names of their tensors."""
    key = keys.get(wrong[0], wrong[0])
    mine, others = own[key], right[key]
    away, error = distance(mine, others), (mine - others).abs()
    are_wrong = error > 1e-3 * away * others.abs().max() if math.isfinite(away) else ~error.isfinite()
    parts = own.writers(key, are_wrong)
    ranks = f", as rank {' and '.join(map(str, parts))} wrote them," if parts else ""
    scale = mistakes.scale_of(mine, others)
    told = "differ" if scale is None else f"are {scale:.4g} times what they should be"
    told += f" ({100 * away:.3g} % away)" if math.isfinite(away) else ": there, not all of them are finite"
    return f"after {step} steps: {what} {wrong[0]}{and_others(len(wrong) - 1)}{ranks} {told}"


def _changed(name: str, own: Saved, right: Saved, own_before: Saved, right_before: Saved) -> str:
    """Return the end of a sentence: by how much too much a weight has changed since the checkpoint before."""
    scale = mistakes.scale_of(own[name] - own_before[name], right[name] - right_before[name])
    if scale is None:
        return ""
    since = f"since step {own_before.checkpoint.step}"
    return f"; {since}, {name} has changed by {scale:.3g} times as much as it should"
