"""Reading what a run has recorded: each rank's part of a tensor, and the whole tensor from all of them."""

import json
from collections.abc import Iterator
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distlab.axes.grid import Grid
from distlab.axes.layout import Layout, layout_size, replicas_in
from distlab.checkpoints.format import numbered
from distlab.run.recording import file_of
from distlab.settings.folders import RECORDED
from simplellm.errors import InputError, require


class TensorPart:
    """A rank's part of a tensor: its elements, and their blocks in the whole.

    Attributes:
        flat: its elements, in the order of memory, as float32: (elements,).
        whole: the shape of the whole tensor.
        blocks: the offsets and sizes of its blocks in the whole.
    """

    def __init__(self, flat: Tensor, whole: list[int], blocks: list[tuple[list[int], list[int]]]) -> None:
        self.flat, self.whole, self.blocks = flat.float(), whole, blocks

    @property
    def is_whole(self) -> bool:
        return self.flat.numel() == prod(self.whole)

    def of(self, whole: Tensor) -> Tensor:
        """Return the same part of a whole tensor: (elements,)."""
        regions = [whole[_region(block)].flatten() for block in self.blocks]
        return torch.cat(regions) if regions else whole.new_empty(0)

    def put_into(self, whole: Tensor, is_there: Tensor) -> None:
        """Write the elements into their places, and mark these."""
        sizes = [prod(lengths) for _, lengths in self.blocks]
        for block, piece in zip(self.blocks, self.flat.split(sizes), strict=True):
            whole[_region(block)], is_there[_region(block)] = piece.view(block[1]), True


def _region(block: tuple[list[int], list[int]]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(*block, strict=True))


class RankStep:
    """A rank's records of a step."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, "pt")
            self._parts = json.loads(self._file.metadata()["parts"])
        except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
            raise InputError(f"{path}: cannot be read ({error}); record the run again") from error

    def names(self, kind: str) -> list[str]:
        """Return the names of the tensors of a kind, "gradient", "weights" or "share.0", in the model's order."""
        return [key.removeprefix(f"{kind}.") for key in self._parts if key.startswith(f"{kind}.")]

    def has(self, kind: str, name: str) -> bool:
        return f"{kind}.{name}" in self._parts

    def part(self, kind: str, name: str) -> TensorPart:
        key = f"{kind}.{name}"
        return TensorPart(self._file.get_tensor(key), *self._parts[key])


class Recordings:
    """The recordings of all ranks of a run.

    Args:
        run: the run's folder.
        config: its `config.json`.
    """

    def __init__(self, run: Path, config: dict[str, Any]) -> None:
        self.run = run
        self.layout: Layout = config["layout"]
        self.world_size = int(config.get("world_size") or layout_size(self.layout))
        self.describe = Grid(0, self.layout).describe
        self._ranks: dict[int, list[RankStep]] = {}

    @property
    def replicas(self) -> int:
        return replicas_in(self.layout)

    @cached_property
    def steps(self) -> list[int]:
        """The steps that all ranks of the run, and no others, have recorded; the last one has weights only.

        A run that was resumed with another number of ranks may have older steps.
        """
        expected = {file_of(self.run, 0, rank).name for rank in range(self.world_size)}
        found = numbered(self.run / RECORDED)
        return [
            step
            for step, folder in found.items()
            if {path.name for path in folder.glob("rank*.safetensors")} == expected
        ]

    def ranks(self, step: int) -> list[RankStep]:
        if step not in self._ranks:
            self._ranks[step] = [RankStep(file_of(self.run, step, rank)) for rank in range(self.world_size)]
        return self._ranks[step]

    def names(self, step: int, kind: str) -> list[str]:
        """Return the names of all ranks' tensors of a kind, in the model's order as far as ranks know it."""
        return list(dict.fromkeys(name for rank in self.ranks(step) for name in rank.names(kind)))

    def parts(self, step: int, kind: str, name: str) -> Iterator[tuple[int, TensorPart]]:
        """Yield each rank that holds a part of a tensor, and the part."""
        for rank, records in enumerate(self.ranks(step)):
            if records.has(kind, name):
                yield rank, records.part(kind, name)

    def whole(self, step: int, kind: str, name: str) -> Tensor:
        """Return a whole tensor; where ranks hold the same elements, those of the lowest rank.

        Raises:
            InputError: no rank has recorded some of its elements.
        """
        parts = [part for _, part in self.parts(step, kind, name)]
        require(bool(parts), f"{self.run}: no rank has recorded {name} in step {step}")
        if parts[0].is_whole:
            return parts[0].flat.view(parts[0].whole)
        whole = torch.zeros(parts[0].whole)
        is_there = torch.zeros_like(whole, dtype=torch.bool)
        for part in reversed(parts):
            part.put_into(whole, is_there)
        require(bool(is_there.all()), f"{self.run}: no rank has recorded all of {name} in step {step}")
        return whole
