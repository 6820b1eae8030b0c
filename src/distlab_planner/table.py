"""The table of a plan: its best layouts, and the prediction for each."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distlab_planner.layouts import RunLayout
from distlab_planner.step import Step

HEADS = (
    *("", "layout", "micro-batches", "schedule", "recompute", "shard"),
    *("step", "tokens/s", "bubble", "memory, MB", "sent, MB", "most of a step"),
)
LEFT = 6  # columns of words


@dataclass(frozen=True)
class Row:
    """A layout and its prediction."""

    layout: RunLayout
    step: Step
    held_bytes: int  # of the rank that holds most: weights, gradients, optimizer state, activations
    process_bytes: float  # of the process of the rank that needs most

    def cells(self, number: int, tokens: int) -> list[str]:
        """Return the cells of the row, for a global batch of `tokens` tokens."""
        layout, step = self.layout, self.step
        return [
            str(number),
            str(layout),
            str(layout.micro_batches),
            layout.schedule if layout.size("pp") > 1 else "-",
            layout.recompute if layout.recompute != "none" else "-",
            layout.shard if layout.shard != "none" else "-",
            milliseconds(step.seconds),
            f"{tokens / step.seconds:,.0f}",
            f"{step.bubble:.0%}" if layout.size("pp") > 1 else "-",
            f"{self.process_bytes / 1e6:,.0f}",
            f"{step.sent_bytes / 1e6:,.1f}",
            step.bound,
        ]


def table(rows: Sequence[Row], tokens: int) -> Iterator[str]:
    """Yield the lines of the table: the heads, and a line for each row."""
    cells = [[*HEADS], *(row.cells(number, tokens) for number, row in enumerate(rows, start=1))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    last = len(widths) - 1
    for line in cells:
        padded = (
            cell.ljust(width) if place < LEFT or place == last else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(padded).rstrip()


def milliseconds(seconds: float) -> str:
    """Return milliseconds with three digits or more, to a microsecond at most: "41.3 ms", "7,282 ms", "0.847 ms"."""
    before_the_point = 1 + math.floor(math.log10(seconds * 1e3)) if seconds >= 1e-3 else 0
    return f"{seconds * 1e3:,.{max(0, 3 - before_the_point)}f} ms"
