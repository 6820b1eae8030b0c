"""The timing loop of the benchmarks: variants in turn, in one run, so that other load affects all of them alike."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from distlab.run.progress import Progress
from simplellm.errors import require, tell

Name = TypeVar("Name")
Batch = TypeVar("Batch")
Result = TypeVar("Result")
ItemT = TypeVar("ItemT")


class Ratio(NamedTuple):
    """The quartiles of ratios of successive measurements."""

    low: float
    median: float
    high: float

    def cells(self, digits: int) -> tuple[str, str]:
        """Two cells of a table: the median, and the lower and upper quartile."""
        return f"{self.median:.{digits}f}", f"{self.low:.{digits}f} to {self.high:.{digits}f}"

    def __str__(self) -> str:
        """All in one cell: 1.06 (1.03 to 1.08)."""
        median, quartiles = self.cells(2)
        return f"{median} ({quartiles})"


def through_lab(step: Callable[[Batch], Result]) -> Callable[[Batch], Result]:
    """The step with the lab's `--compile`."""
    from simplellm.compiler import Compiler

    compiler = Compiler()

    def compiled(batch: Batch) -> Result:
        with compiler.applied():
            return step(batch)

    return compiled


def results_in_turn(
    works: Mapping[Name, Callable[[Batch], Result]],
    batch_of: Callable[[int], Batch],
    turns: int,
    warm_up: int,
    what: str = "turns",
) -> dict[Name, list[Result]]:
    """What each work returns in each turn, such as its own seconds.

    Every second turn has the reversed order, so that none always runs in another's wake.

    Args:
        works: what is measured, by name.
        batch_of: the input of all works in a turn, by the turn's number.
        turns: that are counted.
        warm_up: turns before them.
        what: the turns are called in the remarks about the time left.
    """
    results: dict[Name, list[Result]] = {name: [] for name in works}
    for turn in each(range(warm_up + turns), what):
        batch = batch_of(turn)
        for name in list(works)[:: -1 if turn % 2 else 1]:
            results[name].append(works[name](batch))
    return {name: of_one[warm_up:] for name, of_one in results.items()}


def seconds_in_turn(
    steps: Mapping[Name, Callable[[Batch], object]],
    batch_of: Callable[[int], Batch],
    turns: int,
    warm_up: int = 2,
    meet: Callable[[], object] = lambda: None,
) -> dict[Name, list[float]]:
    """Wall-clock seconds of each step in each turn; see `results_in_turn`.

    Args:
        meet: waits for other ranks, or for a device, before and after each step.
    """

    def timed(step: Callable[[Batch], object]) -> Callable[[Batch], float]:
        def seconds(batch: Batch) -> float:
            meet()
            started = time.perf_counter()
            step(batch)
            meet()
            return time.perf_counter() - started

        return seconds

    return results_in_turn({name: timed(step) for name, step in steps.items()}, batch_of, turns, warm_up)


def quartiles_of_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Those of the ratios turn by turn, of at least two turns."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return Ratio(*statistics.quantiles(ratios, method="inclusive"))


def require_quartiles(flag: str, turns: int, least: int = 2) -> None:
    """Raise `InputError` for a flag that asks for too few turns to have quartiles."""
    require(turns >= least, f"{flag} {turns}: quartiles need at least {least}")


def each(items: Sequence[ItemT], what: str) -> Iterator[ItemT]:
    """Yield the items, and print on stderr (on rank 0 only) how long the remaining ones will take."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    progress = Progress(len(items), tell if is_first else lambda _: None, what=what, warms_up=False)
    for done, item in enumerate(items, 1):
        yield item
        progress.advance(done)
