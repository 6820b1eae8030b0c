"""The page as a file."""

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

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
    """Return the page, with plotly's script inside."""
    require_package("plotly", "a page")
    from plotly.offline import get_plotlyjs

    data = contents(run, other, is_live)
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    before, _, after = template.partition("/*DATA*/")
    scripts, _, end = after.partition("/*PLOTLY*/")
    return "".join([before, as_script(data), scripts, _unwrapped(get_plotlyjs()), end])


def _unwrapped(plotly: str) -> str:
    """Return plotly's script without the function around it, which is for other loaders than a script element.

    A browser parses all of the function first to find its end, and once more to run it: a quarter of a page's time.
    """
    head, start, rest = plotly.partition("(\n function(root, factory)")
    _, start, rest = rest.partition('"use strict";var Plotly=(()=>{')
    body, end, _ = rest.rpartition("window.Plotly = Plotly;")
    return head + start + body if end else plotly


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
