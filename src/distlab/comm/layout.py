"""How many ranks a run has along each kind of parallelism."""

import math
from collections.abc import Sequence
from typing import Literal

# Ranks along each kind of parallelism, in this order: first the kind whose ranks are farthest apart. A missing kind
# means 1.
Layout = dict[str, int]
Neighbors = Literal["stages", "replicas"]  # what ranks with neighboring numbers hold, apart from slices of a stage


def layout_size(layout: Layout) -> int:
    """Number of ranks of a layout; 1 for one process, whose layout is empty."""
    return math.prod(layout.values())


def neighbors_of(layout: Layout) -> Neighbors:
    """Whether a pipeline's stages are on neighboring ranks, or the replicas of a stage."""
    kinds = [kind for kind in layout if kind in ("dp", "pp")]
    return "replicas" if kinds == ["pp", "dp"] else "stages"


def pipelines_on_host(ranks: int, pp: int, copies: int, neighbors: Neighbors) -> int:
    """Of how many pipelines a host runs workers; slices of a stage count as pipelines of their own.

    Args:
        ranks: on the host.
        pp: workers of a pipeline.
        copies: ranks that hold a stage or a slice of it: replicas times slices.
        neighbors: what neighboring ranks hold.
    """
    return min(copies, ranks) if neighbors == "replicas" else max(1, ranks // pp)


def layout_flags(layout: Layout) -> str:
    """The flags that request a layout, as a user would write them."""
    if not layout:
        return "one process"
    if len(layout) == 1 or "pp" not in layout:
        return f"--world-size {layout_size(layout)}"
    flags = " ".join(f"--{name} {layout[name]}" for name in ("dp", "pp", "tp") if name in layout)
    return flags + " --neighbors replicas" * (neighbors_of(layout) == "replicas")


def name_stages(stages: Sequence[int]) -> str:
    """The name of stages in messages: "stage 1", "stages 1 and 4"."""
    *others, last = map(str, stages)
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
