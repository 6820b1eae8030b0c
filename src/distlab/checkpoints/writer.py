"""Writes a rank's tensors into safetensors files, for torch.distributed.checkpoint."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from distlab.comm.together import together

PIECE_BYTES = 1 << 24
CANNOT_SYNC = errno.EINVAL, errno.ENOSYS, errno.ENOTSUP  # from SMB, WSL1 and VirtualBox, for folders
DTYPES = {  # by their names in safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class ShardWriter(StorageWriter):
    """Makes every rank write its own files, hash them, and sync them; other ranks see that it is still at work.

    torch's writer first copies all of a rank's tensors, and in the copy a later part of a tensor would replace an
    earlier one. Here tensors are written one by one: the first parts of all tensors into a rank's first file, the
    second parts into its second file, and so on. torch's reader reads them. `what` is the checkpoint's name in waits.

    Attributes:
        files: on rank 0, at the end, the size and checksum of all ranks' files, by name.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self._folder, self._what = folder, what
        self.files: dict[str, dict[str, Any]] = {}

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=number) for number, plan in enumerate(plans, 1)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        future: Future[list[WriteResult]] = Future()
        future.set_result(together(self._what, lambda: self._write(plan, planner)))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.files = dict(result.storage_data for written in results for result in written)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write this rank's files; the results have the name, size and checksum of each."""
        files: dict[int, list[WriteItem]] = {}
        parts: Counter[str] = Counter()
        for item in plan.items:
            parts[item.index.fqn] += 1
            files.setdefault(parts[item.index.fqn], []).append(item)
        results = []
        for number, items in files.items():
            name = f"shard-{plan.storage_data:05}-model-{number:05}-of-00001.safetensors"
            about = write_safetensors(self._folder / name, items, planner)
            results.append(WriteResult(items[0].index, about["bytes"], (name, about)))
        return results


def write_safetensors(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> dict[str, Any]:
    """Write parts of tensors into a file, and sync it; return its size and checksum, as for a checkpoint's record.

    The format: https://github.com/huggingface/safetensors#format
    """
    tensors: list[tuple[MetadataIndex, Any]] = [(item.index, planner.resolve_data(item)) for item in items]
    # As the library does, so that each tensor begins at a multiple of its dtype's size.
    tensors.sort(key=lambda pair: (-pair[1].itemsize, pair[0].fqn))
    parts = {index.fqn: {"saved_offsets": index.offset} for index, _ in tensors}
    info = {"DCP_SHARDING_INFO": json.dumps(parts), "DCP_VERSION": "1.0", "format": "pt"}
    header: dict[str, Any] = {"__metadata__": info}
    end = 0
    for index, tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[index.fqn] = {"dtype": DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first: list[Any] = [len(text).to_bytes(8, "little") + text]
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in chain(first, *(_pieces(tensor) for _, tensor in tensors)):
            digest.update(piece)
            file.write(piece)
        file.flush()
        sync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, piece by piece."""
    content: Any = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    for start in range(0, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]


def sync(descriptor: int) -> None:
    """Sync a file, or a folder's entries, to the disk; without effect in file systems that cannot do so."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise


def sync_path(path: Path) -> None:
    """Sync a file or a folder by its path; some file systems cannot open folders."""
    with contextlib.suppress(IsADirectoryError, PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)
