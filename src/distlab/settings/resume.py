"""The settings that a resumed run inherits from its checkpoint, and the ones that must match; the layout may change."""

import hashlib
import os
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from simplellm.errors import InputError, require

if TYPE_CHECKING:
    from distlab.checkpoints.format import Checkpoint


class ResumePolicy(Enum):
    """The treatment of a setting in a resumed run: ``lr: Annotated[float, ResumePolicy.DEFAULT] = 8e-4``."""

    MODEL = "a size of the model; must equal the checkpoint's"
    FIXED = "must equal the checkpoint's"
    DEFAULT = "the checkpoint's value unless another is given"
    SAME_LAYOUT = "like DEFAULT, but only in the layout that wrote the checkpoint"
    PER_REPLICA = "like DEFAULT; in another layout, scaled so that the total over all replicas stays the same"


def marked(settings: object, *policies: ResumePolicy) -> list[str]:
    """Return the names of the fields with one of these policies; a subclass may override a default or policy."""
    found: dict[str, ResumePolicy] = {}
    for declaring in reversed(type(settings).__mro__):
        for name, hint in get_type_hints(declaring, include_extras=True).items():
            for mark in getattr(hint, "__metadata__", ()):
                if isinstance(mark, ResumePolicy):
                    found[name] = mark
    return [name for name, policy in found.items() if policy in policies]


def per_step(checkpoint: "Checkpoint", settings: Any) -> dict[str, int]:
    """Return the consumption of a step of the checkpoint's run on all replicas, by the setting for one replica."""
    saved = checkpoint.record["settings"]
    counts = {name: saved[name] for name in marked(settings, ResumePolicy.PER_REPLICA) if name in saved}
    replicas = checkpoint.layout.get("dp", 1)
    return {name: count * replicas for name, count in counts.items() if isinstance(count, int)}


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value from a checkpoint's record has the type of a field."""
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return isinstance(value, list) and len(value) == len(parts) and all(map(fits, value, parts))
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
    if any(get_origin(kind) is Literal for kind in kinds):
        kinds.add(str)  # `RunSettings.check` checks the choices
    if float in kinds:
        kinds.add(int)
    return type(value) in kinds


def is_choice(value: Any, hint: Any) -> bool:
    """Return whether a value is a choice of a field, if the field lists choices."""
    return get_origin(hint) is not Literal or value in get_args(hint)


def require_same(what: str, name: str, saved: Any, own: Any) -> None:
    """Raise `InputError` unless a setting has the checkpoint's value; `what` is the beginning of the message."""
    require(saved == own, f"{what} --{name.replace('_', '-')} {saved}, not {own}; leave that flag out")


def check_data(checkpoint: "Checkpoint", own: dict[str, Any] | None) -> None:
    """Raise `InputError` if a run's data are known to differ from the checkpoint's."""
    data = checkpoint.record.get("data")
    if data and own and _content(data) != _content(own):
        seed = f" and --seed {data['seed']}" if "seed" in data else ""
        source = f"--data {data['source']}{seed}"
        raise InputError(f"{checkpoint.folder}: it was trained on {source}; leave out the flags that differ")


def file_identity(data: str) -> dict[str, Any]:
    """Return a record that identifies a file, or a folder of files."""
    path = Path(os.path.expanduser(data))  # unchanged where there is no home folder
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    beginnings = hashlib.sha256()
    for part in files:
        if part != path:
            beginnings.update(f"{part.relative_to(path)} {part.stat().st_size} ".encode())
        with part.open("rb") as file:
            beginnings.update(file.read(1 << 20))
    size_bytes = sum(part.stat().st_size for part in files)
    return {"source": str(path.absolute()), "bytes": size_bytes, "sha256_of_first_mib": beginnings.hexdigest()}


def content_of(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of a folder's files; hexadecimal."""
    from distlab.checkpoints.format import checksum

    if not path.is_dir():
        return checksum(path)
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        digest.update(f"{file.relative_to(path)} {checksum(file)} ".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _content(data: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of data without the path: a file or folder that was moved is still the same."""
    return {key: value for key, value in data.items() if key != "source" or "bytes" not in data}
