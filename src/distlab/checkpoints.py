"""Checkpoints: all that a run needs to go on, by the parameters' global names, so that any layout can go on with it.

    <run>/checkpoints/step-00000020/
        *.safetensors       written by torch.distributed.checkpoint: a file a rank, no tensor twice
        tokenizer.model     of a model that reads text
        checkpoint.json     the record: step, place in the data, model, settings; size and checksum of every other file

The tensors are ``<parameter>``, ``optimizer.<parameter>.<its state>`` and ``random.<rank>.<device>``. A checkpoint is
written beside its place and renamed when it is complete, so whatever ends a run while it saves, the earlier ones are
there. Nothing in one is ever unpickled: safetensors and JSON hold data alone.
"""

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.traffic import traffic
from simplellm.errors import InputError

FOLDER, RECORD, TOKENIZER, UNFINISHED = "checkpoints", "checkpoint.json", "tokenizer.model", ".unfinished"
SUPERSEDED = "superseded"  # beside the others: what a run that goes on from an earlier step leaves behind
OPTIMIZER, RANDOM = "optimizer.", "random."
LLAMA = "llama"  # the architecture of a record that names none; all others are classifiers
Record = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """One that has been found.

    Attributes:
        folder: where its files are.
        record: what `checkpoint.json` says.
    """

    folder: Path
    record: Record

    @property
    def step(self) -> int:
        """Steps that were taken before it."""
        return int(self.record["step"])

    @property
    def count(self) -> int:
        """What those steps were taken on, in the run's unit: tokens, inputs."""
        return int(self.record[_unit(self.record)])

    @property
    def architecture(self) -> str:
        """Of its model."""
        return _architecture(self.record)

    @property
    def tokenizer(self) -> Path:
        return self.folder / TOKENIZER

    def problem(self, at_a_glance: bool = False) -> str | None:
        """What is wrong with its files; None if it is whole. `at_a_glance`, sizes are looked at, but not contents."""
        for name, expected in self.record["files"].items():
            path = self.folder / name
            if not path.is_file():
                return f"{name} is missing"
            try:
                size = path.stat().st_size
                if size != expected["bytes"]:
                    return f"{name} has {size:,} bytes instead of {expected['bytes']:,}"
                if not at_a_glance and checksum(path) != expected["sha256"]:
                    return f"{name} is damaged: its checksum is not the recorded one"
            except OSError as error:
                return f"{name} cannot be read ({error.strerror})"
        for path in self.folder.glob("*.safetensors"):
            if path.name not in self.record["files"]:  # it would be read along with the others
                return f"{path.name} is none of its files"
        return None


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    digest, piece = hashlib.sha256(), bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(memoryview(piece)[:count])
    return digest.hexdigest()


def _checksum_of(record: Record) -> str:
    """SHA-256 of a record, as it is without its own checksum."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _unit(record: Record) -> str:
    return str(record.get("unit", "tokens"))


def _architecture(record: Record) -> str:
    return str(record.get("architecture", LLAMA))


# To find one


def candidates(path: Path) -> Iterator[Checkpoint | str]:
    """The checkpoints of a run, the last one first; a sentence in place of each that is incomplete or unreadable.

    Args:
        path: a run's folder, that of its checkpoints, or that of one checkpoint.
    """
    parent = path if path.name == FOLDER else path / FOLDER
    in_run = parent.glob("step-*") if os.path.isdir(parent) else ()
    folders = [path] if os.path.exists(path / RECORD) else sorted(in_run, reverse=True)
    for folder in folders:
        try:
            record = json.loads((folder / RECORD).read_text())
            if record.pop("sha256") != _checksum_of(record):
                raise ValueError("its checksum is not the recorded one")
            _check(record)
            yield Checkpoint(folder, record)
        except FileNotFoundError:
            yield f"{folder.name} is incomplete: it has no {RECORD}; the run ended while it was written"
        except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
            yield f"{folder.name} is damaged: {RECORD} cannot be read ({error})"


# What a record says of a Llama's sizes, all at least 1, and of settings that a run takes over from it.
LLAMA_SIZES = ("vocab_size", "dmodel", "num_heads", "num_kv_heads", "hidden_dim", "n_layers", "ctx_size")
SETTINGS: dict[str, type | tuple[type, ...]] = {
    "seq_len seed batch_size train_size samples bsz": int,
    "lr dropout": (int, float),
    "optimizer dtype": str,
}


def _check(record: Record) -> None:
    """Raise `ValueError` unless a record has what every reader of one relies on: it may be written by hand."""

    def require(is_right: bool, name: str, value: Any) -> None:
        if not is_right:
            raise ValueError(f"its {name} cannot be {value!r:.50}")

    def is_count(value: Any, least: int = 0) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63

    for name in ("step", _unit(record)):
        require(is_count(record.get(name)), name, record.get(name))
    for name in ("model", "settings", "files"):
        require(isinstance(record.get(name), dict), name, record.get(name))
    model, settings, files = record["model"], record["settings"], record["files"]
    is_llama = _architecture(record) == LLAMA
    for name in LLAMA_SIZES if is_llama else model:
        require(is_count(model.get(name), least=1), name, model.get(name))
    for name in ("rope_theta", "norm_eps") if is_llama else ():
        require(isinstance(model.get(name), int | float) and model[name] > 0, name, model.get(name))
    for names, kind in SETTINGS.items():
        for name in names.split():
            require(name not in settings or isinstance(settings[name], kind), name, settings.get(name))
    require(TOKENIZER in files or not is_llama, "list of files", [*files])
    for name, about in files.items():
        is_right = Path(name).name == name and isinstance(about, dict) and is_count(about.get("bytes"))
        require(is_right and isinstance(about.get("sha256"), str), f"entry for the file {name}", about)
    for name, parts in (("position", ("document" if is_llama else "epoch", "offset")), ("data", ())):
        value = record.get(name)
        is_right = value is None or (isinstance(value, dict) and all(is_count(value.get(part)) for part in parts))
        require(is_right, name, value)
    data = record.get("data") or {"source": ""}
    require(isinstance(data.get("source"), str), "data", data)


def has_checkpoints(run: Path) -> bool:
    """True if a run has kept one whose record can be read."""
    return any(isinstance(found, Checkpoint) for found in candidates(run))


def last_whole(path: Path, say: Callable[[str], None] = lambda _: None, at_a_glance: bool = False) -> Checkpoint:
    """The last checkpoint of a run (or the one at `path`) all of whose files are there as they were written.

    Args:
        path: a run's folder, that of its checkpoints, or that of one checkpoint.
        say: told about each one that is passed over, and why.
        at_a_glance: look at the files' sizes alone, not at their contents.

    Raises:
        InputError: there is none.
    """
    problems = []
    for candidate in candidates(path):
        problem: str | None
        if isinstance(candidate, Checkpoint):
            problem = candidate.problem(at_a_glance)
            if problem is None:
                return candidate
            problem = f"{candidate.folder.name}: {problem}"
        else:
            problem = candidate
        say(f"passed over a checkpoint: {problem}")
        problems.append(problem)
    raise InputError(_none_at(path) + "".join(f"; {problem}" for problem in problems))


def _none_at(path: Path) -> str:
    if not os.path.exists(path):
        return f"{path}: there is no such folder; give that of a run, or of one of its checkpoints"
    return f"{path}: no whole checkpoint is there; a run with --save-every keeps some"


# To write one


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
    unfinished = _place(run, record["step"], UNFINISHED)
    try:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True, exist_ok=True)  # another rank may have been quicker
        writer = dcp.HuggingFaceStorageWriter(str(unfinished), save_distributed=True)
        with traffic.named(f"the checkpoint of step {record['step']}"), _without_warnings():
            written = dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
        if rank == 0:
            if _parts(_tensors_in(unfinished)) != _parts(written.state_dict_metadata):
                raise InputError(f"--out {run}: not all ranks' files are there; give a folder that all machines share")
            _complete(run, record, tokenizer, keep)
    except (OSError, dcp.CheckpointException) as error:
        raise InputError(f"--save-every: cannot write {unfinished} ({_root_of(error)})") from error


def _place(run: Path, step: int, ending: str = "") -> Path:
    return run / FOLDER / f"step-{step:08}{ending}"


def _parts(tensors: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Each part of each tensor that has been written, by where it begins in the whole."""
    return {(name, tuple(part.offsets)) for name, tensor in tensors.items() for part in tensor.chunks}


def _complete(run: Path, record: Record, tokenizer: bytes | None, keep: int) -> None:
    """Add to an unfinished checkpoint what makes it whole, and put it in its place."""
    unfinished, place = (_place(run, record["step"], ending) for ending in (UNFINISHED, ""))
    if tokenizer is not None:
        _write(unfinished / TOKENIZER, tokenizer)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": checksum(path)} for path in unfinished.iterdir()}
    record = {**record, "files": files}
    _write(unfinished / RECORD, (json.dumps({**record, "sha256": _checksum_of(record)}, indent=2) + "\n").encode())
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


def _root_of(error: BaseException) -> str:
    """What a rank ran into, out of the exception in which torch collects those of all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return getattr(error, "strerror", None) or str(error).splitlines()[0]


# What is in one


def state_of(net: nn.Module, optimizer: Optimizer, rank: int, own_moments: bool) -> dict[str, Any]:
    """All tensors of this rank that a checkpoint holds, by name; to write them, or to read into.

    Args:
        net: the model or a stage of it, without what wraps it; parameters that are a slice say so (see
            `Team.own_parameter`).
        optimizer: of all its parameters.
        rank: of this process.
        own_moments: the optimizer's state is this rank's own, not that of all replicas.
    """
    from distlab.slices import as_held

    tensors: dict[str, Any] = {f"{RANDOM}{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors[f"{RANDOM}{rank}.cuda"] = torch.cuda.get_rng_state()
    for name, parameter in net.named_parameters():
        tensors[name] = as_held(parameter.detach(), parameter)
        for key, value in optimizer.state[parameter].items() if parameter in optimizer.state else ():
            tensors[f"{_owner(rank, own_moments)}{OPTIMIZER}{name}.{key}"] = as_held(value, parameter)
    return tensors


def _owner(rank: int, own_moments: bool) -> str:
    return f"rank{rank}." if own_moments else ""


# To read one


def restore(checkpoint: Checkpoint, net: nn.Module, optimizer: Optimizer, rank: int, layout: dict[str, int]) -> None:
    """Give parameters, optimizer state and, in the layout that saved them, random generators their values.

    Each rank reads what it needs, whoever wrote it: a whole tensor, or its slice out of other slices. What is read
    needs a place first, and an optimizer has no state before its first step.

    Args:
        checkpoint: a whole one.
        net, optimizer, rank: as for `state_of`.
        layout: that of the run; in another one, ranks that have to draw the same would not be the same ranks.

    Raises:
        InputError: the checkpoint is that of another model.
    """
    there = _tensors_in(checkpoint.folder)
    own_moments = bool(checkpoint.record.get("own_moments"))
    for name, parameter in net.named_parameters():
        prefix = _owner(rank, own_moments) + f"{OPTIMIZER}{name}."
        for key in there:
            if key.startswith(prefix):
                shape = parameter.shape if there[key].size else ()
                state = torch.zeros(shape, dtype=there[key].properties.dtype, device=parameter.device)
                optimizer.state[parameter][key.removeprefix(prefix)] = state
    tensors = state_of(net, optimizer, rank, own_moments)
    generators = there.keys() if checkpoint.record.get("layout") == layout else ()
    tensors = {name: tensor for name, tensor in tensors.items() if name in generators or not name.startswith(RANDOM)}
    _read_into(tensors, checkpoint)
    random = f"{RANDOM}{rank}"
    if f"{random}.cpu" in tensors:
        torch.set_rng_state(tensors[f"{random}.cpu"])
    if f"{random}.cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"{random}.cuda"])


def _tensors_in(folder: Path) -> dict[str, Any]:
    """What is known of each tensor without reading it."""
    from torch.distributed import checkpoint as dcp

    try:
        return dict(dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)
    except (SafetensorError, OSError, ValueError, LookupError) as error:
        raise InputError(f"{folder}: its tensors cannot be read ({_root_of(error)})") from error


def _read_into(tensors: dict[str, Any], checkpoint: Checkpoint) -> None:
    from torch.distributed import checkpoint as dcp

    try:
        with _without_warnings():
            reader = dcp.HuggingFaceStorageReader(str(checkpoint.folder))
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except (dcp.CheckpointException, SafetensorError) as error:
        raise InputError(f"{checkpoint.folder}: its tensors are not those of this model ({_root_of(error)})") from error


# A model alone, as it is exchanged


@dataclass(frozen=True)
class SavedModel:
    """A model out of a checkpoint, whole.

    Attributes:
        options: keyword arguments of `simplellm.llama`'s models, but for device, dtype and seed.
        parameters: by name, float32.
        tokenizer: a SentencePiece model.
        step: steps that it has been trained for; None if that is not known.
    """

    options: dict[str, Any]
    parameters: dict[str, Tensor]
    tokenizer: Path
    step: int | None = None


def read_model(run: Path, say: Callable[[str], None] = lambda _: None) -> SavedModel:
    """The model of a run's last whole checkpoint (or of the one at `run`), whatever the layout that saved it.

    Args:
        run: a run's folder, that of its checkpoints, or that of one checkpoint.
        say: told about each checkpoint that is passed over, and why.

    Raises:
        InputError: there is none, or it is that of a classifier.
    """
    checkpoint = last_whole(run, say)
    if checkpoint.architecture != LLAMA:
        raise InputError(
            f"{checkpoint.folder}: its model is of the architecture {checkpoint.architecture}; only a {LLAMA} can tell "
            "stories and be exported"
        )
    parameters = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in _tensors_in(checkpoint.folder).items()
        if RANDOM not in name and OPTIMIZER not in name
    }
    _read_into(parameters, checkpoint)
    return SavedModel(checkpoint.record["model"], parameters, checkpoint.tokenizer, checkpoint.step)


def write_model(run: Path, model: SavedModel) -> None:
    """Make a run's folder with one checkpoint, of a model that took no steps here: to go on from with `--resume`.

    What ends the writing early, such as a full disk, leaves nothing.

    Raises:
        InputError: the files cannot be written.
    """
    record = {"step": 0, "tokens": 0, "model": model.options, "settings": {}}
    tokenizer, unfinished = model.tokenizer.read_bytes(), _place(run, 0, UNFINISHED)
    made = [path for path in unfinished.parents if not path.exists()]
    try:
        save(run, dict(model.parameters), record, tokenizer, keep=1)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()
        if isinstance(error, InputError):
            why = _root_of(error.__cause__ or error)
            raise InputError(f"{run}: cannot be written ({why}); give another folder") from error
        raise
