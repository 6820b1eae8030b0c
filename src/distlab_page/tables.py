"""Tables of a page, and which of many rows it shows."""

from collections.abc import Iterable, Sequence
from typing import Any

Json = dict[str, Any]


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]], shares: Sequence[str] = ()) -> Json:
    """Return a table; the columns `shares` are shown in percent."""
    return {"caption": caption, "head": [*head], "rows": [[*row] for row in rows], "shares": [*shares]}


def evenly_spaced(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most this many items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return [*items]
    if most == 1:
        return [items[len(items) // 2]]
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]
