"""The folders that runs keep their files in."""

import contextlib
import fcntl
import itertools
import os
import time
from datetime import datetime
from pathlib import Path

from simplellm.errors import InputError

SECONDS_TO_LEAVE = 2.0  # that a run which was killed may still need


class Claim:
    """A run's folder for this process alone, among those of this computer, until `release` or the process's end.

    Without effect where folders cannot be locked.

    Raises:
        InputError: another run is using it, or it cannot be made.
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


def _lock(descriptor: int) -> bool:
    """Whether a folder is this process's now, or cannot be locked, as on some network file systems."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def new_folder(parent: Path) -> Path:
    """Create a folder named after the time, with a number appended if that name exists.

    Raises `InputError` if none can be created there.
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
