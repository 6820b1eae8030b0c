"""The folders that runs keep their files in."""

import contextlib
import itertools
from datetime import datetime
from pathlib import Path


def new_folder(parent: Path) -> Path:
    """Create a folder named after the time, with a number appended if that name exists."""
    name = now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            (parent / name).mkdir(parents=True)
            break
        name = f"{now}-{number}"
    return parent / name
