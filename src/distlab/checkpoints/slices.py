"""Slices of parameters for torch.distributed.checkpoint, which by itself supports only those of DTensor."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Slice(Tensor):
    """A rank's part of a tensor, which a checkpoint writes and reads as a slice of the whole, like DTensor.

    The part begins at `start` along `dim`, along which the whole tensor has `length`.
    """

    # Operations on it return plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, part: Tensor, dim: int, start: int, length: int) -> "Slice":
        return part.as_subclass(cls)  # shares the memory

    def __init__(self, part: Tensor, dim: int, start: int, length: int) -> None:
        self.part = part
        self.offsets = torch.Size([start if d == dim else 0 for d in range(part.dim())])
        self.whole = torch.Size([length if d == dim else size for d, size in enumerate(part.shape)])

    def size(self, *dim: Any) -> Any:
        return self.whole[dim[0]] if dim else self.whole

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self.offsets, self.part.shape)]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.part), self.whole)
        return [WriteItem(MetadataIndex(name, self.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.part


def as_held(tensor: Tensor, parameter: Tensor) -> Tensor:
    """`tensor` (the parameter or optimizer state of its shape), as a `Slice` if the parameter is a shard."""
    held = getattr(parameter, "shard_spec", None)  # see TPGroup.own_parameter
    return tensor if held is None or tensor.shape != parameter.shape else Slice(tensor, *held)
