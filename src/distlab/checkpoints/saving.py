"""Writing a checkpoint with all ranks together, and reading one into a model and its optimizer.

`distlab.checkpoints.format` describes the contents, and checks that a checkpoint is complete.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer

from distlab.checkpoints import FOLDER
from distlab.checkpoints.format import (
    RECORD,
    TOKENIZER,
    UNFINISHED,
    Checkpoint,
    Record,
    checksum_of,
    in_the_way,
    numbered,
    place_of,
)
from distlab.comm.names import named
from distlab.comm.together import together
from simplellm.errors import InputError, require

SUPERSEDED = "superseded"  # folder for later checkpoints when a run resumes from an earlier step
OPTIMIZER, RANDOM = "optimizer.", "random."
# In the names of tensors that are not the model's: also those of one rank, and those that PowerSGD's ranks share.
NOT_OF_MODEL = re.compile(rf"{re.escape(OPTIMIZER)}|{re.escape(RANDOM)}|^rank\d+\.|^powersgd\d+\.")
Parameters = Mapping[str, nn.Parameter]  # of a rank, by their names in the whole model


def save(run: Path, tensors: dict[str, Any], record: Record, tokenizer: bytes | None, keep: int) -> None:
    """Write a checkpoint of all ranks' tensors; every rank must call this function.

    Args:
        tensors: this rank's tensors by name, whole or as a `Slice`; tensors that several ranks hold are written once.
        record: rank 0 writes its record to `checkpoint.json`, with the list of files.
        tokenizer: the SentencePiece model; None for a model that does not read text.
        keep: number of the run's checkpoints to keep, including this one.

    Raises:
        InputError: the files cannot be written, or rank 0 does not see the files of other ranks.
        TrafficError: another rank was lost.
    """
    from torch.distributed import checkpoint as dcp

    from distlab.checkpoints.writer import ShardWriter

    rank = dist.get_rank() if dist.is_initialized() else 0
    unfinished, what = place_of(run, record["step"], UNFINISHED), f"the checkpoint of step {record['step']}"
    writer = ShardWriter(unfinished, what)

    def complete() -> None:
        if rank == 0:
            is_all = _parts(tensors_in(unfinished)) == _parts(written.state_dict_metadata)
            require(is_all, f"--out {run}: files of some ranks are missing; give a folder that all machines share")
            _complete(run, record, tokenizer, keep, writer.files)

    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        with named(what, "checkpoints"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a single process writes
            written = dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
        together(what, complete)
    except (OSError, dcp.CheckpointException) as error:
        raise InputError(f"--save-every: cannot write {unfinished} ({root_of(error)})") from error


def _parts(tensors: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Return the name and the offsets of each part of each tensor."""
    return {(name, tuple(part.offsets)) for name, tensor in tensors.items() for part in tensor.chunks}


def _complete(run: Path, record: Record, tokenizer: bytes | None, keep: int, files: dict[str, dict[str, Any]]) -> None:
    """Add tokenizer and record to an unfinished checkpoint, rename it, and remove old ones.

    `files` are the files with the tensors, which are on the disk.
    """
    from distlab.checkpoints.writer import sync_path

    unfinished, place = (place_of(run, record["step"], ending) for ending in (UNFINISHED, ""))
    if tokenizer is not None:
        (unfinished / TOKENIZER).write_bytes(tokenizer)
        sync_path(unfinished / TOKENIZER)
        files = files | {TOKENIZER: {"bytes": len(tokenizer), "sha256": hashlib.sha256(tokenizer).hexdigest()}}
    record = {**record, "files": files}
    record["sha256"] = checksum_of(record)
    (unfinished / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    for path in (unfinished / RECORD, unfinished):
        sync_path(path)
    unfinished.rename(place)
    sync_path(place.parent)
    earlier = [
        path for step, path in numbered(place.parent).items() if step < record["step"] and (path / RECORD).is_file()
    ]
    for path in earlier[: max(0, len(earlier) - keep + 1)]:
        _delete(path)


def make_room(run: Path, resumed: Checkpoint | None = None) -> None:
    """Prepare a run's folder for its checkpoints, before any rank writes one.

    Unfinished checkpoints are deleted. Checkpoints after the step at which the run resumes are moved aside.

    Args:
        resumed: the checkpoint of this folder that the run resumes from; None for a new run.

    Raises:
        InputError: a file or folder is in the way of a checkpoint, or checkpoints cannot be written there.
    """
    folder, first = run / FOLDER, -1 if resumed is None else resumed.step + 1
    own = None if resumed is None else resumed.folder.resolve()

    def later() -> list[Path]:
        return [path for step, path in numbered(folder).items() if step >= first]

    def unfinished() -> list[Path]:
        return [path for path in numbered(folder, UNFINISHED).values() if path.resolve() != own]

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in unfinished():
            _delete(path)
        if resumed is not None and later():
            aside = folder / SUPERSEDED
            aside.mkdir(exist_ok=True)
            for path in later():
                if path.resolve() != own:
                    path.rename(_free_name(aside / path.name))
    except OSError as error:
        raise InputError(f"--save-every: cannot write checkpoints in {folder} ({root_of(error)})") from error
    for path in later() + unfinished():  # one may be `resumed`, which the user has given the name of a later step
        raise in_the_way(run, path)


def _delete(path: Path) -> None:
    """Delete a checkpoint, which counts as unfinished from the first moment on; do not follow links."""
    with contextlib.suppress(OSError):
        if path.suffix != UNFINISHED:
            path = path.rename(path.with_name(path.name + UNFINISHED))
        shutil.rmtree(path)


def _free_name(path: Path) -> Path:
    """Return a free path: this one, or the same with a number after it."""
    numbers = itertools.count(2)
    place = path
    while os.path.lexists(place):
        place = path.with_name(f"{path.name}-{next(numbers)}")
    return place


def root_of(error: BaseException) -> str:
    """Return the message of one rank's error, from the exception in which torch collects the errors of all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return getattr(error, "strerror", None) or str(error).splitlines()[0]


def state_of(parameters: Parameters, optimizer: Optimizer, rank: int, is_per_rank: bool) -> dict[str, Any]:
    """Return this rank's tensors for a checkpoint, by name, to be written or to be read into.

    `is_per_rank` says that the optimizer states of replicas differ.
    """
    from distlab.checkpoints.slices import as_held

    tensors: dict[str, Any] = {f"{RANDOM}{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors[f"{RANDOM}{rank}.cuda"] = torch.cuda.get_rng_state()
    prefix = _optimizer_prefix(rank, is_per_rank)
    for name, parameter in parameters.items():
        tensors[name] = as_held(parameter.detach(), parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{prefix}{name}.{key}"] = value if is_per_rank else as_held(value, parameter)
    return tensors


def _optimizer_prefix(rank: int, is_per_rank: bool) -> str:
    return f"rank{rank}.{OPTIMIZER}" if is_per_rank else OPTIMIZER


def restore(
    checkpoint: Checkpoint, parameters: Parameters, optimizer: Optimizer, rank: int, layout: dict[str, int]
) -> None:
    """Load parameters, optimizer state and, if the layout is the same, the states of the random generators.

    Each rank reads the data that it needs, whichever rank wrote them: a whole tensor, or its slice of one written in
    other slices. The optimizer's state is allocated first, because an optimizer has none before its first step.

    Args:
        layout: the layout of this run. In a layout that differs from the checkpoint's, other ranks need the same random
            numbers, so the states of the generators are not restored.

    Raises:
        InputError: the checkpoint belongs to another model.
    """
    saved = tensors_in(checkpoint.folder)
    is_per_rank = checkpoint.per_rank_optimizer_state
    for name, parameter in parameters.items():
        prefix = f"{_optimizer_prefix(rank, is_per_rank)}{name}."
        for key in (key for key in saved if key.startswith(prefix)):
            shape = parameter.shape if saved[key].size else ()
            state = torch.zeros(shape, dtype=saved[key].properties.dtype, device=parameter.device)
            optimizer.state[parameter][key.removeprefix(prefix)] = state
    generators = saved.keys() if checkpoint.record.get("layout") == layout else ()
    tensors = state_of(parameters, optimizer, rank, is_per_rank)
    tensors = {name: tensor for name, tensor in tensors.items() if name in generators or not name.startswith(RANDOM)}
    read_into(tensors, checkpoint)
    for device, set_state in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        if f"{RANDOM}{rank}.{device}" in tensors:
            set_state(tensors[f"{RANDOM}{rank}.{device}"])


def tensors_in(folder: Path) -> dict[str, Any]:
    """Return the metadata of each tensor, by name; `InputError` if the tensors cannot be read."""
    from torch.distributed import checkpoint as dcp

    try:
        return dict(dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)
    except (SafetensorError, OSError, ValueError, LookupError) as error:
        raise InputError(f"{folder}: its tensors cannot be read ({root_of(error)})") from error


def is_of_model(name: str) -> bool:
    """Return whether a checkpoint's tensor of this name is the model's."""
    return NOT_OF_MODEL.search(name) is None


def read_into(tensors: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Read tensors or slices of them, by name; `InputError` if the checkpoint does not contain them."""
    from torch.distributed import checkpoint as dcp

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a single process reads
            reader = dcp.HuggingFaceStorageReader(str(checkpoint.folder))
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        raise InputError(f"{checkpoint.folder}: its tensors do not match this model ({root_of(error)})") from error
