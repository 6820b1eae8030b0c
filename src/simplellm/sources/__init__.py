"""Sources of documents: the generator, the hub's TinyStories, or a file; each has a fixed order and two splits.

A kind of source is imported when it is asked for.
"""

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simplellm.sources.source import Source

SPLITS = ("train", "validation")


def choose_source(data: str) -> tuple[str, str]:
    """Return the source that `data` stands for, and a phrase about it.

    Args:
        data: as for `TinyStories`.

    Returns:
        "sample", "tinystories" or a path, never "auto"; and a phrase for the log that names the source and, for "auto",
        the reason for it.
        "auto" is the hub's TinyStories if it is cached or can be reached, else the generator; without a network, this
        function takes at most 2 seconds.
    """
    if data == "sample":
        return data, "the generator"
    if data == "tinystories":
        return data, "the hub's TinyStories"
    if data != "auto":
        return data, data
    if find_spec("datasets") is None:
        return "sample", "the generator: the hub's TinyStories needs datasets, which is not installed"
    from simplellm.sources.hub import choose_hub

    return choose_hub()


def open_source(data: str, split: str, seed: int, revision: str | None = None) -> Source:
    """Return the documents of a split, from a source that `choose_source` returned.

    Args:
        revision: revision of the hub's data set; by default the newest in the local cache, if any, else the newest.

    Raises:
        InputError: `data` cannot be read.
    """
    if data == "sample":
        from simplellm.sources.generator import Generator

        return Generator(split, seed)
    if data == "tinystories":
        from simplellm.sources.hub import open_hub

        return open_hub(split, revision)
    from simplellm.sources.files import open_split

    return open_split(data, split)


def source_identity(data: str, split: str, seed: int, revision: str | None = None) -> dict[str, Any] | None:
    """Return a record that identifies the documents of `open_source`; None if the arguments do not identify them.

    A file is identified without its path, by its size, its time of modification and its first MiB.
    """
    if data == "sample":
        return {"source": data, "split": split, "seed": seed}
    if data == "tinystories":
        from simplellm.sources.hub import hub_identity

        return hub_identity(split, revision)
    path = Path(os.path.expanduser(data))
    try:
        if not path.is_file():
            return None
        status = path.stat()
        with path.open("rb") as file:
            beginning = hashlib.sha256(file.read(1 << 20)).hexdigest()
    except OSError:
        return None
    same = {"format": path.suffix.lower(), "bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    return {"sha256_of_first_mib": beginning, **same, "split": split}
