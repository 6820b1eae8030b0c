"""Markdown tables, printed line by line: bench/README.md has them, and `python bench` reads and writes them there.

print_head("variant", "ms a step (median):", "time over torch (median)", "quartiles")
print_row("ours", milliseconds(ours), *quartiles_of_ratios(ours, torchs).cells(3))
"""

import statistics
from collections.abc import Sequence


def print_head(*headings: str) -> None:
    """Print the headings; a column whose heading ends with ":" is aligned to the right."""
    print_row(*(heading.removesuffix(":") for heading in headings))
    print("".join("|---:" if heading.endswith(":") else "|---" for heading in headings) + "|", flush=True)


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def milliseconds(seconds: Sequence[float], digits: int = 0) -> str:
    """The median of seconds, as a cell."""
    return f"{1e3 * statistics.median(seconds):,.{digits}f}"


def per_second(count: float, seconds: Sequence[float]) -> str:
    """How many of what takes the median of `seconds` are done in a second, as a cell."""
    return f"{count / statistics.median(seconds):,.0f}"


def range_of(values: Sequence[float], digits: int = 2) -> str:
    """The smallest and the largest value, as a cell."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def compared(slow: Sequence[float], fast: Sequence[float]) -> tuple[str, str, str, str]:
    """Four cells: both medians in milliseconds, and how many times as fast the second is, with the range."""
    ratios = [before / now for before, now in zip(slow, fast, strict=True)]
    return milliseconds(slow), milliseconds(fast), f"{statistics.median(ratios):.3f}", range_of(ratios)
