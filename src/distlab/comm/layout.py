"""How many ranks a run has along each kind of parallelism."""

import math
from collections.abc import Sequence

Layout = dict[str, int]  # ranks along each kind of parallelism; a missing kind means 1


def layout_size(layout: Layout) -> int:
    """Number of ranks of a layout; 1 for one process, whose layout is empty."""
    return math.prod(layout.values())


def layout_flags(layout: Layout) -> str:
    """The flags that request a layout, as a user would write them."""
    if not layout:
        return "one process"
    if len(layout) == 1 or "pp" not in layout:
        return f"--world-size {layout_size(layout)}"
    return " ".join(f"--{name} {size}" for name, size in layout.items())


def name_stages(stages: Sequence[int]) -> str:
    """The name of stages in messages: "stage 1", "stages 1 and 4"."""
    *others, last = map(str, stages)
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
