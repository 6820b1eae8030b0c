"""A run's records for a notebook: the panels of its page (`distlab_page.contents`) as drawings and tables."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distlab.settings.folders import CONFIG
from distlab_page.tables import Json
from distlab_playground import drawing


def known(folder: Path) -> list[str]:
    """Return the runs below a folder, the newest first."""
    files = sorted(folder.rglob(CONFIG), key=lambda file: file.stat().st_mtime, reverse=True)
    return [str(file.parent) for file in files]


def not_computing(spent: Json) -> float:
    """Return the share of the time of all ranks in which they did not compute."""
    computing = sum(row[0] for row in spent["rows"])
    return 1 - computing / sum(map(sum, spent["rows"]))


def time(spent: Json) -> str:
    """Return a drawing of the seconds of each rank, by activity."""
    parts = [dict(zip(spent["head"], row, strict=True)) for row in spent["rows"]]
    return drawing.stacked(spent["ranks"], parts, "seconds of each rank by activity", "s", 3)


def tables(page: Any) -> Iterator[Json]:
    """Yield all tables of a page."""
    if isinstance(page, dict):
        if {"caption", "head", "rows"} <= page.keys():
            yield page
        for held in page.values():
            yield from tables(held)
    elif isinstance(page, list):
        for held in page:
            yield from tables(held)


def table(shown: Json) -> str:
    """Return a table of a page as HTML."""
    shares = [name in shown["shares"] for name in shown["head"]]
    lines = [[_cell(*pair) for pair in zip(row, shares, strict=True)] for row in shown["rows"]]
    return drawing.table(shown["head"], lines, shown["caption"])


def _cell(value: Any, is_share: bool) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1%}" if is_share else f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
