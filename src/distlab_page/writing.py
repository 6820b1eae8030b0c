"""The page as a file."""

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from distlab_page import drawing_library
from distlab_page.contents import contents
from distlab_page.records import Records, read
from simplellm.errors import InputError, require_package

NAME = "page.html"


def write(folder: Path, other: Path | None = None, to: Path | None = None, has_ended: bool = False) -> Path:
    """Write the page of a run, by default into its folder, and return its path.

    Args:
        folder: of the run, or of runs, of which the newest counts.
        other: of a second run, laid over the first one's curves.
        to: the file.
        has_ended: no rank writes to the folder any more, though this process may still hold its lock.

    Raises:
        InputError: a folder has no complete records of a run, plotly is not installed, or the file cannot be written.
    """
    run, second = read(folder, has_ended), read(other) if other else None
    path = to or run.folder / NAME
    page = html(run, second)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); give another file with --to") from error
    return path


def html(run: Records, other: Records | None = None, is_live: bool = False) -> str:
    """Return the page, with the drawing library inside."""
    require_package("plotly", "a page")
    data = contents(run, other, is_live)
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    before, _, after = template.partition("/*DATA*/")
    scripts, _, end = after.partition("/*PLOTLY*/")
    return "".join([before, as_script(data), scripts, drawing_library.script(), end])


def as_script(data: Any) -> str:
    """Return JSON that an HTML script element can hold: no text in it ends the element, or begins a comment."""
    return json.dumps(_finite(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    """Return JSON values with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
