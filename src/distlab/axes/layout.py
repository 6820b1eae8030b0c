"""How many ranks a run has along each axis of parallelism, and how they are numbered."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

# Ranks along each axis, in this order: first the axis whose ranks are farthest apart. A missing axis has size 1.
Layout = dict[str, int]
Neighbors = Literal["stages", "replicas"]  # what ranks with neighboring numbers hold, apart from slices of a stage

# The axes of the lab's scripts, each with the word for a rank's number along it in messages, in the order in which
# messages name them; None for axes that messages do not name. Any other axis works the same, without a word.
AXIS_WORDS: Mapping[str, str | None] = {"pp": "stage", "cp": "part", "dp": "replica", "ep": None, "tp": None}
REPLICAS, STAGES, SLICES = "dp", "pp", "tp"  # ranks along them hold copies of the model, its layers, slices of these
EXPERTS = "ep"  # replicas that share the experts: the number of replicas is the product of both axes


def layout_size(layout: Layout) -> int:
    """Return the number of ranks of a layout; 1 for one process, whose layout is empty."""
    return math.prod(layout.values())


def equal_parts(total: int, parts: int) -> list[int]:
    """Return the sizes of the parts of `total`, as in `torch.tensor_split`: the first ones may have one more."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def stride(layout: Layout, axis: str) -> int:
    """Difference between the numbers of ranks that are neighbors along an axis."""
    names = [*layout]
    return math.prod(layout[name] for name in names[names.index(axis) + 1 :]) if axis in layout else 1


def coordinate(layout: Layout, rank: int, axis: str) -> int:
    """Return a rank's number along an axis, from 0."""
    return rank // stride(layout, axis) % layout.get(axis, 1)


def replica_of(layout: Layout, rank: int) -> int:
    """Return the number of a rank's replica, which has sequences of its own, from 0."""
    return coordinate(layout, rank, REPLICAS) * layout.get(EXPERTS, 1) + coordinate(layout, rank, EXPERTS)


def replicas_in(layout: Layout) -> int:
    """Return the number of replicas, each with sequences of its own."""
    return layout.get(REPLICAS, 1) * layout.get(EXPERTS, 1)


def times_counted(layout: Layout) -> int:
    """Return how often the sum of all ranks' losses counts a sequence: by each rank that holds the last stage.

    Ranks that share a stage compute the same losses, and replicas each the mean of their own sequences.
    """
    return layout_size(layout) // layout.get(STAGES, 1)


def ranks_along(layout: Layout, axes: Collection[str]) -> list[tuple[int, ...]]:
    """Return all ranks in groups; the ranks of a group differ along these axes only, and ascend."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*map(range, layout.values()))):
        others = tuple(number for name, number in zip(layout, place, strict=True) if name not in axes)
        groups.setdefault(others, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def neighbors_of(layout: Layout) -> Neighbors:
    """Return which ranks are neighbors: the stages of a pipeline, or the replicas of a stage."""
    names = [name for name in layout if name in (REPLICAS, STAGES)]
    return "replicas" if names == [STAGES, REPLICAS] else "stages"


def pipelines_on_host(layout: Layout, ranks: int) -> int:
    """Return how many pipelines have workers among the first `ranks` ranks; each slice of a pipeline counts as one."""
    between = stride(layout, STAGES)  # also the number of pipelines whose ranks are interleaved
    whole, rest = divmod(ranks, between * layout.get(STAGES, 1))
    return whole * between + min(rest, between)


def layout_flags(layout: Layout) -> str:
    """Return the flags that request a layout, as a user would write them."""
    if not layout:
        return "one process"
    if len(layout) == 1 or STAGES not in layout:
        return f"--world-size {layout_size(layout)}"
    sizes = layout | {REPLICAS: replicas_in(layout)} if EXPERTS in layout else layout  # --dp counts all replicas
    flags = " ".join(f"--{name} {sizes[name]}" for name in sorted(sizes))
    return flags + " --neighbors replicas" * (neighbors_of(layout) == "replicas")


def describe_rank(layout: Layout, rank: int, stages: Sequence[Sequence[int]] = ()) -> str:
    """Return the name of a rank in messages: "rank 4 (stage 1 of replica 1)", "rank 0 (stages 0 and 3)".

    `stages` are those of each worker of a pipeline, if there are several.
    """
    sizes = layout | ({REPLICAS: replicas_in(layout)} if REPLICAS in layout else {})
    several = [name for name, size in sizes.items() if size > 1]
    words = {name: AXIS_WORDS[name] for name in AXIS_WORDS if name in several and AXIS_WORDS[name]}
    numbers = {name: f"{word} {coordinate(layout, rank, name)}" for name, word in words.items()}
    if REPLICAS in numbers:
        numbers[REPLICAS] = f"{AXIS_WORDS[REPLICAS]} {replica_of(layout, rank)}"
    if STAGES in numbers and stages:
        numbers[STAGES] = name_stages(stages[coordinate(layout, rank, STAGES)])
    if len(several) == 1 and several != [STAGES]:  # along a single axis, the rank's number is enough
        numbers = {}
    return f"rank {rank} ({' of '.join(numbers.values())})" if numbers else f"rank {rank}"


def name_stages(stages: Sequence[int]) -> str:
    """Return the name of stages in messages: "stage 1", "stages 1 and 4"."""
    *others, last = map(str, stages)
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
