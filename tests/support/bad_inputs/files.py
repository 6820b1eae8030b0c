"""Files that are broken, and what they are made from."""

import functools
import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
from pyarrow import parquet

from support.bad_inputs.inputs import PRIMER, PYTHON, TINY
from support.processes import LAB
from support.terminals import fork_command

OVERLONG = "a" * 5000
STORY = "Once upon a time there was a rank that waited."


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def noise(chance: random.Random, size: int) -> bytes:
    """Random bytes that are no UTF-8 in any line."""
    return b"\xff" + bytes(chance.choice((byte, byte, 0xFE)) for byte in chance.randbytes(size)) + b"\xff"


def table(path: Path, columns: dict[str, list[Any]]) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path.read_bytes()


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(1, len(content) - 1)]


def special(path: Path, how: str) -> None:
    """Something at a path that is no plain file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path)
    else:
        path.symlink_to(how)


STEP = Path("checkpoints/step-00000004")
SHARD = "shard-00001-model-00001-of-00001.safetensors"


@functools.cache
def make_run(folder: Path) -> Path:
    """A run with checkpoints."""
    folder.mkdir(parents=True)
    run = folder / "run"
    command = [PYTHON, str(LAB / PRIMER), *TINY, "--save-every", "4", "--keep", "1", "--out", str(run)]
    succeed(command)
    return run


def succeed(command: Sequence[str]) -> None:
    """Run a command to its end."""
    ended = fork_command(command, lambda: None, OMP_NUM_THREADS="1").finish()
    assert ended.status == 0, ended.err


def damage(path: Path, how: str, chance: random.Random) -> None:
    """Do to a file what disks, networks and hands do."""
    content = bytearray(path.read_bytes())
    if how == "flip":
        at = chance.randrange(len(content))
        content[at] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del content[chance.randrange(len(content) - 1) :]
    elif how == "empty":
        content.clear()
    elif how == "noise":
        content[:] = noise(chance, len(content) - 2)
    elif how == "longer":
        content += b"\0"
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how != "missing":
        path.write_bytes(content)


def forge(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a record, and make all checksums right again."""
    path = step / "checkpoint.json"
    record = json.loads(path.read_text())
    del record["sha256"]
    change(record)
    for name in record["files"] if isinstance(record.get("files"), dict) else ():
        if isinstance(record["files"][name], dict) and (step / name).is_file():
            content = (step / name).read_bytes()
            record["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    record["sha256"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(record))


def export(run: Path, model: Path) -> Path:
    """A run's model in Hugging Face's format."""
    succeed([PYTHON, "-m", "simplellm.export", str(run), str(model)])
    return model
