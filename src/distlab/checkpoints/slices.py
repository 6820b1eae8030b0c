"""Slices of parameters for torch.distributed.checkpoint, which by itself supports only slices of DTensors."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from distlab.axes.placement import placement_of


class TensorBlock(NamedTuple):
    """A rectangular block of a tensor: where it begins in each dimension, and its length there."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Slice(Tensor):
    """A rank's part of a tensor, which a checkpoint writes and reads as blocks of the whole, like DTensor.

    `part` holds the blocks one after another in memory; it is the source of a write, or the target of a read.
    """

    # Operations on it return plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, part: Tensor, whole: Sequence[int], blocks: Sequence[TensorBlock]) -> "Slice":
        return part.as_subclass(cls)  # shares the memory

    def __init__(self, part: Tensor, whole: Sequence[int], blocks: Sequence[TensorBlock]) -> None:
        self.whole = torch.Size(whole)
        views = [part]
        if len(blocks) != 1 or blocks[0].sizes != part.shape:
            pieces = part.view(-1).split([math.prod(block.sizes) for block in blocks])
            views = [piece.view(block.sizes) for piece, block in zip(pieces, blocks, strict=True)]
        self.views = {torch.Size(block.offsets): view for block, view in zip(blocks, views, strict=True)}

    def size(self) -> torch.Size:  # type: ignore[override]
        return self.whole

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, view.shape) for offsets, view in self.views.items()]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(self.views[chunk.offsets]), self.whole
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.views[index.offset]


def as_held(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return `tensor`, the parameter or its optimizer state, as a `Slice` if this rank holds only a part of it."""
    placement, whole = placement_of(parameter), list(parameter.shape)
    if tensor.shape != parameter.shape or not (placement.slices or placement.flat):
        return tensor
    blocks = [TensorBlock((0,) * parameter.dim(), tuple(parameter.shape))]
    if placement.flat is not None:
        start, whole = placement.flat.start, list(placement.flat.shape)
        blocks = list(blocks_of_range(whole, start, start + parameter.numel()))
    for dim, start, length, _ in placement.slices:
        whole[dim] = length
        blocks = [
            TensorBlock((*b.offsets[:dim], b.offsets[dim] + start, *b.offsets[dim + 1 :]), b.sizes) for b in blocks
        ]
    return Slice(tensor, whole, blocks)


def blocks_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[TensorBlock]:
    """Yield the blocks that make up the elements from `start` to `stop` of a tensor, in the order of memory.

    For a matrix there are at most three: the end of a row, whole rows, the beginning of a row.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield TensorBlock((start,) * len(shape), (stop - start,) * len(shape))
        return
    row_length = math.prod(shape[1:])
    while start < stop:
        row, within = divmod(start, row_length)
        rows = (stop - start) // row_length
        if within == 0 and rows:
            yield TensorBlock((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            start += rows * row_length
        else:
            end = min(stop, (row + 1) * row_length)
            for block in blocks_of_range(shape[1:], within, within + end - start):
                yield TensorBlock((row, *block.offsets), (1, *block.sizes))
            start = end
