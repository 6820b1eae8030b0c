"""The timing loop of the benchmarks: variants in turn, in one run, so that other load affects all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from distlab.run.progress import each

Name = TypeVar("Name")
Batch = TypeVar("Batch")
Result = TypeVar("Result")


def through_lab(step: Callable[[Batch], Result]) -> Callable[[Batch], Result]:
    """The step with the lab's `--compile`."""
    from simplellm.compiler import Compiler

    compiler = Compiler()

    def compiled(batch: Batch) -> Result:
        with compiler.applied():
            return step(batch)

    return compiled


def seconds_in_turn(
    steps: Mapping[Name, Callable[[Batch], object]],
    batch_of: Callable[[int], Batch],
    turns: int,
    warm_up: int = 2,
    meet: Callable[[], object] = lambda: None,
) -> dict[Name, list[float]]:
    """Wall-clock seconds of each step in each turn.

    Every second turn has the reversed order, so that no step always runs in another's wake.

    Args:
        steps: what is timed, by name.
        batch_of: the input of all steps in a turn, by the turn's number.
        turns: that are counted.
        warm_up: turns before them.
        meet: waits for other ranks, or for a device, before and after each step.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in steps}
    for turn in each(range(warm_up + turns), "turns"):
        batch = batch_of(turn)
        for name in list(steps)[:: -1 if turn % 2 else 1]:
            meet()
            started = time.perf_counter()
            steps[name](batch)
            meet()
            seconds[name].append(time.perf_counter() - started)
    return {name: of_one[warm_up:] for name, of_one in seconds.items()}


def quartiles_of_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile of the ratios, turn by turn; of at least two turns."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    low, middle, high = statistics.quantiles(ratios, method="inclusive")
    return low, middle, high
