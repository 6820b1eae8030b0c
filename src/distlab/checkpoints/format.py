"""Checkpoints: what they are, and how they are found.

A checkpoint has all that a run needs to resume, by the parameters' global names, so that any layout can resume from it:

    <run>/checkpoints/step-00000020/
        *.safetensors       written by torch.distributed.checkpoint: a file a rank, no tensor twice
        tokenizer.model     of a model that reads text
        checkpoint.json     the record: step, place in the data, model, settings; size and checksum of every other file

The tensors are ``<parameter>``, ``optimizer.<parameter>.<its state>`` and ``random.<rank>.<device>``. A checkpoint is
written beside its place and renamed when it is complete, so whatever ends a run while it saves, the earlier ones are
there. Nothing in one is ever unpickled: safetensors and JSON hold data alone.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simplellm.errors import InputError

FOLDER, RECORD, TOKENIZER = "checkpoints", "checkpoint.json", "tokenizer.model"
PER_RANK_OPTIMIZER_STATE = "own_moments"  # the record's key, as it has been from the first version on
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
    def layout(self) -> dict[str, int]:
        """Of the run that wrote it; empty for one process, and for an imported model."""
        return self.record.get("layout") or {}

    @property
    def per_rank_optimizer_state(self) -> bool:
        """Whether each rank kept an optimizer state of its own, which means nothing to another layout."""
        return bool(self.record.get(PER_RANK_OPTIMIZER_STATE))

    @property
    def tokenizer(self) -> Path:
        return self.folder / TOKENIZER

    def is_of_run(self, folder: Path) -> bool:
        """Whether the run in a folder wrote it."""
        return folder.resolve() in self.folder.resolve().parents

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


def sealed(record: Record) -> Record:
    """A record with its own checksum."""
    return {**record, "sha256": _checksum_of(record)}


def _checksum_of(record: Record) -> str:
    """SHA-256 of a record, as it is without its own checksum."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _unit(record: Record) -> str:
    return str(record.get("unit", "tokens"))


def _architecture(record: Record) -> str:
    return str(record.get("architecture", LLAMA))


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


# What a record says of a Llama's sizes, all at least 1.
LLAMA_SIZES = ("vocab_size", "dmodel", "num_heads", "num_kv_heads", "hidden_dim", "n_layers", "ctx_size")


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
    model, files = record["model"], record["files"]
    is_llama = _architecture(record) == LLAMA
    for name in LLAMA_SIZES if is_llama else model:
        require(is_count(model.get(name), least=1), name, model.get(name))
    for name in ("rope_theta", "norm_eps") if is_llama else ():
        require(isinstance(model.get(name), int | float) and model[name] > 0, name, model.get(name))
    layout = record.get("layout") or {}
    require(isinstance(layout, dict) and all(is_count(size, least=1) for size in layout.values()), "layout", layout)
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


def latest_valid(path: Path, say: Callable[[str], None] = lambda _: None, at_a_glance: bool = False) -> Checkpoint:
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
