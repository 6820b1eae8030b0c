"""Tables of a page, and which of many rows it shows."""

from collections.abc import Iterable, Sequence
from typing import Any

Json = dict[str, Any]
MOST_ROWS = 60  # of a table beside a curve


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


def shown_of(some: Sequence[Any], every: Sequence[Any]) -> str:
    """Return how many of all steps are shown, in words."""
    return f"{len(some):,} of {len(every):,} steps" if len(some) < len(every) else f"all {len(every):,} steps"
