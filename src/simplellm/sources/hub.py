"""The hub's TinyStories, from the network or its local cache."""

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simplellm.errors import InputError, require_package
from simplellm.sources.parquet import Parquet, check_ends
from simplellm.sources.source import Source, first_line, unusable

HUB_REPOSITORY = "roneneldan/TinyStories"  # or a folder with the same files
SECONDS = 2.0  # that the hub may take to answer


def choose_hub() -> tuple[str, str]:
    """Return the hub's TinyStories if it is cached or can be reached, else the generator; see `choose_source`."""
    try:
        if cached_files("train"):
            return "tinystories", "the hub's TinyStories: it is in the local cache"
    except OSError as error:
        why = f"{error.strerror}: {error.filename}" if error.filename else first_line(error)
        return "sample", f"the generator: the hub's TinyStories in the local cache cannot be read ({why})"
    problem, _ = ask_hub()
    if problem is None:
        return "tinystories", "the hub's TinyStories: the hub answers"
    return "sample", f"the generator: the hub's TinyStories cannot be reached ({problem})"


def open_hub(split: str, revision: str | None) -> Source:
    """Return a split of the hub's TinyStories, from the local cache if it is there; `InputError` without datasets."""
    require_package("datasets", "data tinystories", "data")
    try:
        files = cached_files(split, revision)
    except OSError as error:
        raise unusable("tinystories", f"the hub's local cache cannot be read ({error}); give sample") from None
    return Parquet(files) if files else Hub(split, revision)


class Hub(Source):
    """The hub's TinyStories (Eldan and Li, arXiv 2305.07759), streamed over the network."""

    def __init__(self, split: str, revision: str | None) -> None:
        if not os.path.isdir(HUB_REPOSITORY) and (problem := ask_hub()[0]):
            missing = "nothing is cached" if revision is None else f"its revision {revision} is not cached"
            raise self._unreadable(f"the hub cannot be reached and {missing}: {problem}")
        from datasets import load_dataset  # imported here because it takes seconds

        try:
            self._rows = load_dataset(HUB_REPOSITORY, split=split, streaming=True, revision=revision)
        except Exception as error:  # of many kinds, from several libraries
            raise self._unreadable(first_line(error)) from error

    def read(self, start: int) -> Iterator[str]:
        try:
            for row in self._rows.skip(start) if start else self._rows:
                yield row["text"]
        except Exception as error:
            raise self._unreadable(first_line(error)) from error

    def _unreadable(self, why: str) -> InputError:
        advice = "give sample, or the path of a .txt, .jsonl or .parquet file"
        return unusable("tinystories", f"{HUB_REPOSITORY} cannot be read ({why}); {advice}")


def cached_files(split: str, revision: str | None = None) -> list[Path]:
    """Return the Parquet files of the hub's TinyStories in the local cache, in order; [] if they are not all there.

    Args:
        split: "train" or "validation".
        revision: revision of the data set; by default the one that was cached last.

    Raises:
        OSError: the cache or one of the files cannot be read, or a file is not a complete Parquet file.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    snapshots = Path(HF_HUB_CACHE, "datasets--" + HUB_REPOSITORY.replace("/", "--"), "snapshots")
    try:
        names = os.listdir(snapshots)
    except FileNotFoundError:
        return []
    found = (snapshots / name for name in names if revision in (None, name))
    for snapshot in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        files = sorted(snapshot.rglob(f"{split}-*-of-*.parquet"))  # train-00000-of-00004-2d5a1467fff1081b.parquet
        if files and len(files) == int(files[0].name.split("-of-")[1][:5]):
            for file in files:
                check_ends(file)
            return files
    return []


def hub_identity(split: str, revision: str | None) -> dict[str, Any] | None:
    """Return a record that identifies the documents of `open_hub`; None for an unknown revision."""
    try:
        files = [[path.name, path.stat().st_size] for path in cached_files(split, revision)]
    except (OSError, ImportError):
        return None
    is_known = files or (revision is not None and not os.path.isdir(HUB_REPOSITORY))
    return {"source": HUB_REPOSITORY, "split": split, "revision": revision, "files": files} if is_known else None


def hub_revision() -> str | None:
    """Return the revision of the hub's TinyStories that `open_source` would read now; None if it cannot be known."""
    try:
        files = cached_files("train")
    except OSError:  # `open_source` reports it
        return None
    if files:
        return next(path.name for path in files[0].parents if path.parent.name == "snapshots")
    return ask_hub()[1] if not os.path.isdir(HUB_REPOSITORY) else None


def ask_hub() -> tuple[str | None, str | None]:
    """Return why the hub cannot be reached, and its newest revision of TinyStories; one of them is None.

    The hub has `SECONDS` to answer.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set", None
    try:
        from huggingface_hub import HfApi  # may take seconds, which are not the hub's
    except ImportError as error:  # of a package that it needs
        return first_line(error), None

    answer: queue.SimpleQueue[tuple[str | None, str | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put((None, HfApi().dataset_info(HUB_REPOSITORY, timeout=SECONDS).sha))
        except Exception as error:
            answer.put((first_line(error), None))

    # In a separate thread, because the timeout does not cover everything: a host name look-up can take a minute.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.get(timeout=SECONDS)
    except queue.Empty:
        return f"no answer within {SECONDS:g} seconds", None
