"""The format of checkpoints, and how they are found.

A checkpoint contains everything that a run needs to resume. Tensors have the parameters' global names, so any layout
can resume from it:

    <run>/checkpoints/step-00000020/
        *.safetensors       written by torch.distributed.checkpoint: one file per rank, each tensor only once
        tokenizer.model     for a model that reads text
        checkpoint.json     the record: step, position in the data, model, settings; size and checksum of all files

The tensors are ``<parameter>``, ``optimizer.<parameter>.<its state>`` and ``random.<rank>.<device>``; outer optimizers
and compression of gradients add theirs (`is_of_model` in `distlab.checkpoints.saving`). A checkpoint is written to
another folder, which is renamed when it is complete, so a run that ends while it saves never damages an earlier
checkpoint. Nothing in a checkpoint is unpickled: safetensors and JSON contain only data.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlab.checkpoints import FOLDER, LLAMA
from simplellm.errors import InputError, require
from simplellm.options import RopeScaling

RECORD, TOKENIZER = "checkpoint.json", "tokenizer.model"
UNFINISHED = ".unfinished"  # suffix of a checkpoint's folder while it is written or deleted
PER_RANK_OPTIMIZER_STATE = "own_moments"  # the key in the record, unchanged since the first version
# The sizes of a Llama in a record, all at least 1.
LLAMA_SIZES = ("vocab_size", "dmodel", "num_heads", "num_kv_heads", "hidden_dim", "n_layers", "ctx_size")
Record = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder, and the record in its `checkpoint.json`."""

    folder: Path
    record: Record

    @property
    def step(self) -> int:
        """Number of steps before the checkpoint."""
        return int(self.record["step"])

    @property
    def unit(self) -> str:
        """The unit in which the run counts its data: tokens, inputs, …"""
        return str(self.record.get("unit", "tokens"))

    @property
    def count(self) -> int:
        """Data consumed by its steps, in the run's unit."""
        return int(self.record[self.unit])

    @property
    def architecture(self) -> str:
        return str(self.record.get("architecture", LLAMA))

    @property
    def layout(self) -> dict[str, int]:
        """The layout of the run that wrote it; empty for one process and for an imported model."""
        return self.record.get("layout") or {}

    @property
    def per_rank_optimizer_state(self) -> bool:
        """True if each rank kept a separate optimizer state, which cannot be used in another layout."""
        return bool(self.record.get(PER_RANK_OPTIMIZER_STATE))

    @property
    def tokenizer(self) -> Path:
        return self.folder / TOKENIZER

    def has_tokenizer(self, model: Path) -> bool:
        """Return whether it was trained with this SentencePiece model."""
        file = self.record["files"].get(TOKENIZER)
        return file is not None and file["sha256"] == checksum(model)

    def is_of_run(self, folder: Path) -> bool:
        """Return whether the run in this folder wrote it."""
        return folder.resolve() in self.folder.resolve().parents

    def problem(self, at_a_glance: bool = False, share: tuple[int, int] = (0, 1)) -> str | None:
        """Return the damage of its files in words; None if they are intact.

        Args:
            at_a_glance: check sizes only.
            share: the number of this process and how many there are, to check the contents of some files each.
        """
        files = self.record["files"]
        own = sorted(files, key=lambda name: (-files[name]["bytes"], name))[share[0] :: share[1]]
        for name, expected in files.items():
            path = self.folder / name
            if not path.is_file():
                return f"{name} is missing"
            try:
                if (size := path.stat().st_size) != expected["bytes"]:
                    return f"{name} has {size:,} bytes instead of {expected['bytes']:,}"
                if not at_a_glance and name in own and checksum(path) != expected["sha256"]:
                    return f"{name} is damaged: its checksum does not match the record"
            except OSError as error:
                return f"{name} cannot be read ({error.strerror})"
        # Any other safetensors file would be read as part of the checkpoint.
        others = [path.name for path in self.folder.glob("*.safetensors") if path.name not in self.record["files"]]
        return f"{others[0]} does not belong to it" if others else None


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    digest, piece = hashlib.sha256(), bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(memoryview(piece)[:count])
    return digest.hexdigest()


def checksum_of(record: Record) -> str:
    """Return the SHA-256 of a record without its own checksum."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def place_of(run: Path, step: int, ending: str = "") -> Path:
    """Return the folder of a checkpoint; with `UNFINISHED`, the folder in which it is written."""
    return run / FOLDER / f"step-{step:08}{ending}"


def numbered(parent: Path, ending: str = "") -> dict[int, Path]:
    """Return, by step and in order, the paths in a folder of checkpoints whose names could be from `place_of`.

    Everything else in the folder, such as "step-100" or "step-00000004-best", belongs to somebody else.
    """
    pattern = re.compile(rf"step-(\d{{8}}|[1-9]\d{{8,18}}){re.escape(ending)}", re.ASCII)
    try:
        names = os.listdir(parent)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return {}
        raise
    found = {int(match[1]): parent / match[0] for match in map(pattern.fullmatch, names) if match}
    return dict(sorted(found.items()))


def in_the_way(run: Path, path: Path) -> InputError:
    """Return the error for a file or folder that is in the place of a checkpoint that a run will write."""
    return InputError(f"--out {run}: {path} is in the way of its checkpoints; move it, or give another folder")


def candidates(path: Path) -> Iterator[Checkpoint | str]:
    """Yield the checkpoints of a run, latest first; for each incomplete or unreadable one, a sentence instead.

    `path` is the folder of a run, of its checkpoints, or of one checkpoint.
    """
    is_theirs = os.path.basename(os.path.abspath(path)) == FOLDER  # also "." there, and ".." in one of them
    parent = path if is_theirs else path / FOLDER
    in_run = sorted([*numbered(parent, UNFINISHED).items(), *numbered(parent).items()], reverse=True)
    for folder in [path] if os.path.exists(path / RECORD) else [folder for _, folder in in_run]:
        if folder.suffix == UNFINISHED and folder != path:
            yield f"{folder.name} is incomplete: the run ended while it was written"
            continue
        try:
            record = json.loads((folder / RECORD).read_text())
            require(record.pop("sha256") == checksum_of(record), "its checksum does not match")
            checkpoint = Checkpoint(folder, record)
            _check(checkpoint)
            yield checkpoint
        except FileNotFoundError:
            yield f"{folder.name} is incomplete: it has no {RECORD}; the run ended while it was written"
        except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
            yield f"{folder.name} is damaged: {RECORD} cannot be read ({error})"


def _check(checkpoint: Checkpoint) -> None:
    """Raise `ValueError` unless the record is valid; it may have been edited by hand."""
    record, is_llama = checkpoint.record, checkpoint.architecture == LLAMA

    def check(is_right: bool, name: str, value: Any) -> None:
        require(is_right, f"its {name} cannot be {value!r:.50}")

    def is_count(value: Any, least: int = 0) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63

    for name in ("step", checkpoint.unit):
        check(is_count(record.get(name)), name, record.get(name))
    for name in ("model", "settings", "files"):
        check(isinstance(record.get(name), dict), name, record.get(name))
    model, files = record["model"], record["files"]
    for name in LLAMA_SIZES if is_llama else ():  # the settings of a run that resumes say what others may be
        check(is_count(model.get(name), least=1), name, model.get(name))
    for name in ("rope_theta", "norm_eps") if is_llama else ():
        check(isinstance(model.get(name), int | float) and model[name] > 0, name, model.get(name))
    if is_llama:  # an imported model may have features that others do not have
        head_dim, scaling = model.get("head_dim"), model.get("rope_scaling")
        check(head_dim is None or is_count(head_dim, least=1), "head_dim", head_dim)
        check(scaling is None or isinstance(scaling, dict), "rope_scaling", scaling)
        RopeScaling.of(scaling)
        for name in ("attention_bias", "mlp_bias", "shared_expert", "qk_norm"):
            check(model.get(name) in (None, True, False), name, model.get(name))
        for name in ("experts", "experts_per_token"):
            check(name not in model or is_count(model[name], least=1), name, model.get(name))
        check(model.get("router_scores") in (None, "softmax", "sigmoid"), "router_scores", model.get("router_scores"))
    layout = checkpoint.layout
    check(isinstance(layout, dict) and all(is_count(size, least=1) for size in layout.values()), "layout", layout)
    check(TOKENIZER in files or not is_llama, "list of files", [*files])
    for name, about in files.items():
        is_right = Path(name).name == name and isinstance(about, dict) and is_count(about.get("bytes"))
        check(is_right and isinstance(about.get("sha256"), str), f"entry for the file {name}", about)
    place = "document" if checkpoint.unit == "tokens" else "epoch"  # of text, or of what classifiers read
    for name, parts in (("position", (place, "offset")), ("data", ())):
        value = record.get(name)
        is_right = value is None or (isinstance(value, dict) and all(is_count(value.get(part)) for part in parts))
        check(is_right, name, value)
    data = record.get("data") or {"source": ""}
    check(isinstance(data.get("source"), str), "data", data)


def has_checkpoints(run: Path) -> bool:
    """Return whether a run has a checkpoint whose record can be read."""
    return any(isinstance(found, Checkpoint) for found in candidates(run))


def latest_valid(path: Path, say: Callable[[str], None] = lambda _: None, at_a_glance: bool = False) -> Checkpoint:
    """Return the latest checkpoint of a run whose files are all intact.

    Args:
        say: called with a line for each checkpoint that is skipped, which says why.
        at_a_glance: check the files' sizes only, not their contents.

    Raises:
        InputError: there is none.
    """
    reasons: list[str] = []

    def skip(reason: str) -> None:
        say(f"skipped a checkpoint: {reason}")
        reasons.append(reason)

    for checkpoint in valid(path, skip, at_a_glance):
        return checkpoint
    raise no_checkpoint(path, reasons)


def valid(
    path: Path, skipped: Callable[[str], object] = lambda _: None, at_a_glance: bool = False
) -> Iterator[Checkpoint]:
    """Yield a run's intact checkpoints, latest first; call `skipped` with the damage of each of the others."""
    for found in candidates(path):
        if isinstance(found, Checkpoint):
            problem = found.problem(at_a_glance)
            if problem is None:
                yield found
                continue
            found = f"{found.folder.name}: {problem}"
        skipped(found)


def no_checkpoint(path: Path, reasons: Sequence[str]) -> InputError:
    """Return the error for a path without a usable checkpoint; `reasons` say why the existing ones are not usable."""
    sentence = f"{path}: there is no complete checkpoint; a run with --save-every writes them"
    if not os.path.exists(path):
        sentence = f"{path}: there is no such folder; give the folder of a run or of one of its checkpoints"
    return InputError("; ".join([sentence, *reasons]))
