"""The folders in which runs keep their files."""

import contextlib
import fcntl
import itertools
import json
import os
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from distlab.checkpoints import FOLDER
from simplellm.errors import InputError

RECORDED = "recorded"  # folder of a run for `--record-gradients`
CONFIG = "config.json"  # a run's settings; a model in Hugging Face's format has another file of this name
NOT_IN_THE_WAY = re.compile(rf"\..*|rank\d+\.log|{FOLDER}", re.DOTALL)
SECONDS_TO_LEAVE = 2.0  # a killed run may need this long to exit


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's: its `config.json` has settings and a layout."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text()) if path.is_file() else {}
        are_there = all(isinstance(config[name], dict) for name in ("settings", "layout"))
        return are_there and all(isinstance(size, int) and size >= 1 for size in config["layout"].values())
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write a run's settings and layout, so that others see the whole file or none."""
    unfinished = folder / f".{CONFIG}"
    unfinished.write_text(json.dumps(config, indent=2) + "\n")
    unfinished.replace(folder / CONFIG)


def check_out(folder: Path) -> None:
    """Raise `InputError` for a folder with somebody else's files, which a run would replace or mix with its own.

    Hidden and empty files do not count, nor do logs of ranks that ended before there was a `config.json`, nor entries
    that are not files, such as a link to a device.
    """
    try:
        others = [name for name in sorted(os.listdir(folder)) if not NOT_IN_THE_WAY.fullmatch(name)]
        if is_run(folder):  # asked last: its first rank may be writing the first files right now
            return
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be read ({error.strerror}); give another folder") from error
    for name in others:
        if os.path.isfile(folder / name) and os.path.getsize(folder / name):
            raise InputError(f"--out {folder}: has files that are not a run's, such as {name}; give a new folder")


def has_folders(folder: Path) -> bool:
    """Return whether a folder exists and has others in it, as checkpoints are."""
    return folder.is_dir() and any(entry.is_dir() for entry in os.scandir(folder))


class Claim:
    """A lock that keeps all other processes of this computer out of a run's folder, until `release` or exit.

    Has no effect where folders cannot be locked.

    Raises:
        InputError: another run is using the folder, or it cannot be made.
    """

    def __init__(self, out: Path) -> None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(out, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"--out {out}: cannot write there ({error.strerror}); give another folder") from error
        deadline = time.monotonic() + SECONDS_TO_LEAVE
        while not _lock(self._descriptor):
            if time.monotonic() > deadline:
                os.close(self._descriptor)
                raise InputError(f"--out {out}: another run is writing there; give another folder")
            time.sleep(0.1)

    def release(self) -> None:
        os.close(self._descriptor)


def is_claimed(folder: Path) -> bool:
    """Return whether a run is writing to a folder, so that it has a claim on it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return not _lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a folder; return whether that succeeded or locks do not exist, as on some network file systems."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def new_folder(parent: Path) -> Path:
    """Create a folder named after the time, with a number appended if that name exists.

    Raises `InputError` if it cannot be created there.
    """
    name = now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(2):
            with contextlib.suppress(FileExistsError):
                (parent / name).mkdir()
                break
            name = f"{now}-{number}"
    except OSError as error:
        raise InputError(f"{parent}: no folder can be created there ({error.strerror}); give --out") from error
    return parent / name
