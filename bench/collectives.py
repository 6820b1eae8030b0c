"""All-reduces: the lab's ring and shared memory beside the library's; and every topology beside its prediction.

python bench/collectives.py
python bench/collectives.py --worlds 3 --starts 2 --rounds 100
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import group_over_gloo, run_ranks
from tables import milliseconds, print_head, print_row
from turns import each, quartiles_of_ratios, require_quartiles

from distlab.collectives.ring import allreduce_ring
from distlab.comm.group import empty
from distlab_planner.collective_model import LIBRARY, bytes_of_a_message, operations, predict_collective, whole_numbers
from distlab_planner.collective_probes import Probes, seconds_in_turn
from simplellm import command_line
from simplellm.errors import require

Cell = tuple[str, str, int]  # operation, topology, megabytes
Comparison = tuple[float, float]  # the predicted and the measured seconds
SMALLEST_FITTED_BYTES = 1_000_000
SMALL_MEGABYTES = 16  # of what is smaller there are more turns, so that they take as long
Turns = dict[str, list[float]]  # the seconds of the turns of each all-reduce, and of a copy


@dataclass
class Settings:
    """What to measure."""

    worlds: list[int] = field(default_factory=lambda: [2, 4])
    """numbers of ranks for the all-reduces"""
    megabytes: list[int] = field(default_factory=lambda: [4, 40])
    """sizes of the all-reduces"""
    starts: int = 3
    """number of starts of the ranks: the memory that they happen to get changes all their times by up to a tenth"""
    rounds: int = 30
    """timed turns of each in each start"""
    in_a_row: int = 5
    """calls per turn, one after another like the buckets of a training step"""
    predicted_rounds: int = 3
    """timed turns, in each start, of what is compared with its prediction, and of what that is fitted from; of sizes
    below 16 MB as many more as they are smaller"""
    predicted_world: int = 4
    """ranks for the comparison with the predictions"""
    predicted_megabytes: list[int] = field(default_factory=lambda: [1, 4, 16, 64])
    """sizes for it; none for no comparison"""
    port: int = 29556
    """where rank 0 listens"""


def compare_with_library(settings: Settings) -> dict[int, Turns]:
    """One rank: the all-reduces in turn, for each size, and a copy of as many bytes by all ranks at once."""
    library = group_over_gloo()
    found = {}
    for megabytes in settings.megabytes:
        tensor, other = torch.zeros(megabytes * 250_000), torch.zeros(megabytes * 250_000)
        works = {
            "library": partial(dist.all_reduce, tensor, group=library),
            "ring": partial(allreduce_ring, tensor),
            "shared": partial(dist.all_reduce, empty(len(tensor), tensor)),
            "copy": partial(other.copy_, tensor),
        }
        found[megabytes] = seconds_in_turn(works, settings.rounds, settings.in_a_row)
    return found


def results_of(work: Callable[[Settings], Any], world_size: int, settings: Settings) -> Iterator[Any]:
    """Start the ranks several times; what rank 0 has measured in each start."""
    for _ in each(range(settings.starts), f"starts of {world_size} ranks"):
        yield run_ranks(work, world_size, settings.port, settings)


def measure_all_reduces(world_size: int, settings: Settings) -> dict[int, Turns]:
    """By megabytes, the seconds of all turns."""
    of_sizes: dict[int, Turns] = {megabytes: defaultdict(list) for megabytes in settings.megabytes}
    for of_start in results_of(compare_with_library, world_size, settings):
        for megabytes, seconds in of_start.items():
            for name, turns in seconds.items():
                of_sizes[megabytes][name] += turns
    return of_sizes


def show_ring(world_size: int, of_sizes: dict[int, Turns]) -> None:
    for megabytes, seconds in of_sizes.items():
        ours, library = seconds["ring"], seconds["library"]
        medians = milliseconds(library, 2), milliseconds(ours, 2)
        print_row(world_size, f"{megabytes} MB", *medians, *quartiles_of_ratios(library, ours).cells(2))


def show_shared(world_size: int, of_sizes: dict[int, Turns]) -> None:
    for megabytes, seconds in of_sizes.items():
        ours = seconds["shared"]
        to_library, to_copy = quartiles_of_ratios(seconds["library"], ours), quartiles_of_ratios(ours, seconds["copy"])
        print_row(world_size, f"{megabytes} MB", milliseconds(ours, 2), *to_library.cells(2), *to_copy.cells(2))


def compare_with_prediction(settings: Settings) -> dict[Cell, Comparison]:
    """One rank: every operation in every topology, beside what the simulated world says."""
    found, world_size = {}, dist.get_world_size()
    for operation in operations(0):
        for megabytes in settings.predicted_megabytes:
            size_bytes = whole_numbers(megabytes * 1_000_000, world_size)
            for topology, work in operations(size_bytes)[operation].items():
                if topology == LIBRARY:
                    continue
                # Fitted again for each, in turn with it: a computer's speed drifts, and large tensors evict its caches.
                # A small message is dominated by latency, and gives no bandwidth.
                message_bytes = max(
                    SMALLEST_FITTED_BYTES, bytes_of_a_message(operation, topology, size_bytes, world_size)
                )
                probes = Probes(message_bytes, size_bytes)
                rounds = settings.predicted_rounds * max(1, SMALL_MEGABYTES // megabytes)
                seconds = seconds_in_turn({"work": work, **probes.works()}, rounds, settings.in_a_row)
                if dist.get_rank() == 0:
                    costs = probes.costs(seconds, world_size)
                    world = predict_collective(operation, topology, size_bytes, world_size, costs, settings.in_a_row)
                    comparison = world.makespan / settings.in_a_row, statistics.median(seconds["work"])
                    found[operation, topology, megabytes] = comparison
    return found


def measure_predictions(settings: Settings) -> dict[Cell, list[Comparison]]:
    """Of each operation, topology and size, a comparison of each start."""
    comparisons: dict[Cell, list[Comparison]] = defaultdict(list)
    for of_start in results_of(compare_with_prediction, settings.predicted_world, settings):
        for cell, comparison in of_start.items():
            comparisons[cell].append(comparison)
    return comparisons


def show_predictions(comparisons: dict[Cell, list[Comparison]]) -> None:
    """A line for each operation and topology. By size, medians over the starts: predicted, measured: their ratio."""
    ratios: list[float] = []
    rows: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for (operation, topology, megabytes), of_starts in comparisons.items():
        ratios.append(statistics.median(measured / predicted for predicted, measured in of_starts))
        predicted, measured = (1e3 * statistics.median(seconds) for seconds in zip(*of_starts, strict=True))
        rows[operation, topology][megabytes] = f"{predicted:.2f}, {measured:.2f}: {ratios[-1]:.2f}"
    sizes = dict.fromkeys(megabytes for *_, megabytes in comparisons)
    print()
    print_head("operation", "topology", *(f"{size} MB" for size in sizes))
    for names, cells in rows.items():
        print_row(*names, *(cells[size] for size in sizes))
    within = sum(abs(1 / ratio - 1) <= 0.3 for ratio in ratios)
    print(f"\n{within} of {len(ratios)} predictions are within 30 % of what was measured")


def main(settings: Settings) -> None:
    require_quartiles("--rounds", settings.rounds, least=4)
    least = min(settings.starts, settings.predicted_rounds, settings.in_a_row)
    require(least > 0, "--starts, --predicted-rounds and --in-a-row: give at least 1")
    in_a_world_of_one = f"--predicted-world {settings.predicted_world}: in a world of one there is nothing to send"
    require(settings.predicted_world > 1, in_a_world_of_one)
    smallest = min([*settings.megabytes, *settings.predicted_megabytes], default=1)
    require(smallest > 0, "--megabytes and --predicted-megabytes: give at least 1")
    if settings.worlds and settings.megabytes:
        to_library = "speed of ours to the library's (median)"
        print_head("ranks", "size", "library, ms", "our ring, ms", to_library, "quartiles")
        measured = {}
        for world_size in settings.worlds:
            measured[world_size] = measure_all_reduces(world_size, settings)
            show_ring(world_size, measured[world_size])
        heads = "speed to the library's (median)", "quartiles", "time over a plain copy (median)", "quartiles"
        print()
        print_head("ranks", "size", "shared memory, ms", *heads)
        for world_size, of_sizes in measured.items():
            show_shared(world_size, of_sizes)
    if settings.predicted_megabytes:
        show_predictions(measure_predictions(settings))


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
