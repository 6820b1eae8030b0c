"""The folders that runs keep their files in."""

import contextlib
import itertools
from datetime import datetime
from pathlib import Path

from simplellm.errors import InputError


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
