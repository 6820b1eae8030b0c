"""Writing a checkpoint, all ranks together, and reading one into a model and its optimizer.

What is in it, and that it is whole, is `distlab.checkpoints.format`' to say.
"""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer

from distlab.checkpoints.format import FOLDER, RECORD, TOKENIZER, Checkpoint, Record, checksum, sealed
from distlab.comm.traffic import traffic
from simplellm.errors import InputError

UNFINISHED = ".unfinished"  # where one is written, beside its place
SUPERSEDED = "superseded"  # beside the others: what a run that goes on from an earlier step leaves behind
OPTIMIZER, RANDOM = "optimizer.", "random."


def save(run: Path, tensors: dict[str, Any], record: Record, tokenizer: bytes | None, keep: int) -> None:
    """Write a checkpoint of all ranks' tensors; every rank must call it.

    Args:
        run: the run's folder, which all ranks see.
        tensors: what this rank holds, by name, whole or as a `Slice`; what several ranks hold is written by one.
        record: rank 0's goes to `checkpoint.json`, with the list of files.
        tokenizer: the SentencePiece model; None for a model that reads no text.
        keep: how many of the run's checkpoints to leave, this one included.

    Raises:
        InputError: the files cannot be written, or rank 0 does not see what other ranks have written.
        TrafficError: another rank was lost.
    """
    from torch.distributed import checkpoint as dcp

    rank = dist.get_rank() if dist.is_initialized() else 0
    unfinished = place_of(run, record["step"], UNFINISHED)
    try:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True, exist_ok=True)  # another rank may have been quicker
        writer = dcp.HuggingFaceStorageWriter(str(unfinished), save_distributed=True)
        with traffic.named(f"the checkpoint of step {record['step']}"), _without_warnings():
            written = dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
        if rank == 0:
            if _parts(tensors_in(unfinished)) != _parts(written.state_dict_metadata):
                raise InputError(f"--out {run}: not all ranks' files are there; give a folder that all machines share")
            _complete(run, record, tokenizer, keep)
    except (OSError, dcp.CheckpointException) as error:
        raise InputError(f"--save-every: cannot write {unfinished} ({root_of(error)})") from error


def place_of(run: Path, step: int, ending: str = "") -> Path:
    """A checkpoint's folder; with `UNFINISHED`, where it is written."""
    return run / FOLDER / f"step-{step:08}{ending}"


def _parts(tensors: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Each part of each tensor that has been written, by where it begins in the whole."""
    return {(name, tuple(part.offsets)) for name, tensor in tensors.items() for part in tensor.chunks}


def _complete(run: Path, record: Record, tokenizer: bytes | None, keep: int) -> None:
    """Add to an unfinished checkpoint what makes it whole, and put it in its place."""
    unfinished, place = (place_of(run, record["step"], ending) for ending in (UNFINISHED, ""))
    if tokenizer is not None:
        _write(unfinished / TOKENIZER, tokenizer)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": checksum(path)} for path in unfinished.iterdir()}
    record = {**record, "files": files}
    _write(unfinished / RECORD, (json.dumps(sealed(record), indent=2) + "\n").encode())
    _sync(unfinished)
    unfinished.rename(place)
    _sync(place.parent)
    whole = sorted(path for path in place.parent.glob("step-*") if path.suffix == "")
    for path in [*whole[: max(0, len(whole) - keep)], *place.parent.glob(f"step-*{UNFINISHED}")]:
        shutil.rmtree(path, ignore_errors=True)


def supersede(run: Path, step: int) -> None:
    """Set aside a run's checkpoints of later steps than this one, from which it goes on in another way.

    What was not finished is removed.
    """
    aside = run / FOLDER / SUPERSEDED
    for path in (run / FOLDER).glob("step-*"):
        number = path.name[len("step-") :].partition(".")[0]
        if not (path / RECORD).exists():
            shutil.rmtree(path, ignore_errors=True)
        elif number.isdigit() and int(number) > step:
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / path.name, ignore_errors=True)
            path.rename(aside / path.name)


def _write(path: Path, content: bytes) -> None:
    """Write a file, and have it reach the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Have the names in a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence torch's remark that a single process reads or writes, as it is to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def root_of(error: BaseException) -> str:
    """What a rank ran into, out of the exception in which torch collects those of all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return getattr(error, "strerror", None) or str(error).splitlines()[0]


def state_of(
    parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, rank: int, per_rank_optimizer_state: bool
) -> dict[str, Any]:
    """All tensors of this rank that a checkpoint holds, by name; to write them, or to read into.

    Args:
        parameters: of this rank, by their names in the whole model; one that is a slice says so (see
            `TPGroup.own_parameter`).
        optimizer: of all of them.
        rank: of this process.
        per_rank_optimizer_state: the optimizer's state is this rank's own, not that of all replicas.
    """
    from distlab.checkpoints.slices import as_held

    tensors: dict[str, Any] = {f"{RANDOM}{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors[f"{RANDOM}{rank}.cuda"] = torch.cuda.get_rng_state()
    for name, parameter in parameters.items():
        tensors[name] = as_held(parameter.detach(), parameter)
        for key, value in optimizer.state[parameter].items() if parameter in optimizer.state else ():
            tensors[f"{_owner(rank, per_rank_optimizer_state)}{OPTIMIZER}{name}.{key}"] = as_held(value, parameter)
    return tensors


def _owner(rank: int, per_rank_optimizer_state: bool) -> str:
    return f"rank{rank}." if per_rank_optimizer_state else ""


def restore(
    checkpoint: Checkpoint,
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
    rank: int,
    layout: dict[str, int],
) -> None:
    """Give parameters, optimizer state and, in the layout that saved them, random generators their values.

    Each rank reads what it needs, whoever wrote it: a whole tensor, or its slice out of other slices. What is read
    needs a place first, and an optimizer has no state before its first step.

    Args:
        checkpoint: a whole one.
        parameters, optimizer, rank: as for `state_of`.
        layout: that of the run; in another one, ranks that have to draw the same would not be the same ranks.

    Raises:
        InputError: the checkpoint is that of another model.
    """
    there = tensors_in(checkpoint.folder)
    per_rank_optimizer_state = checkpoint.per_rank_optimizer_state
    for name, parameter in parameters.items():
        prefix = _owner(rank, per_rank_optimizer_state) + f"{OPTIMIZER}{name}."
        for key in there:
            if key.startswith(prefix):
                shape = parameter.shape if there[key].size else ()
                state = torch.zeros(shape, dtype=there[key].properties.dtype, device=parameter.device)
                optimizer.state[parameter][key.removeprefix(prefix)] = state
    tensors = state_of(parameters, optimizer, rank, per_rank_optimizer_state)
    generators = there.keys() if checkpoint.record.get("layout") == layout else ()
    tensors = {name: tensor for name, tensor in tensors.items() if name in generators or not name.startswith(RANDOM)}
    read_into(tensors, checkpoint)
    random = f"{RANDOM}{rank}"
    if f"{random}.cpu" in tensors:
        torch.set_rng_state(tensors[f"{random}.cpu"])
    if f"{random}.cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"{random}.cuda"])


def tensors_in(folder: Path) -> dict[str, Any]:
    """What is known of each tensor without reading it, by name.

    Raises:
        InputError: there are no tensors, or none that can be read.
    """
    from torch.distributed import checkpoint as dcp

    try:
        return dict(dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)
    except (SafetensorError, OSError, ValueError, LookupError) as error:
        raise InputError(f"{folder}: its tensors cannot be read ({root_of(error)})") from error


def read_into(tensors: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Read tensors, or slices of them, by name.

    Raises:
        InputError: the checkpoint has no such tensors.
    """
    from torch.distributed import checkpoint as dcp

    try:
        with _without_warnings():
            reader = dcp.HuggingFaceStorageReader(str(checkpoint.folder))
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except (dcp.CheckpointException, SafetensorError) as error:
        raise InputError(f"{checkpoint.folder}: its tensors are not those of this model ({root_of(error)})") from error
