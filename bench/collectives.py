"""All-reduces: the lab's ring and shared memory beside the library's; and every topology beside its prediction.

python bench/collectives.py
python bench/collectives.py --worlds 3 --starts 2 --rounds 100
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from ranks import group_over_gloo, join
from turns import quartiles_of_ratios

from distlab.collectives.ring import allreduce_ring
from distlab.comm.group import empty
from distlab.machine.processes import leave
from distlab.run.progress import each
from distlab_planner.collective_model import LIBRARY, bytes_of_a_message, operations, predict_collective, whole_numbers
from distlab_planner.collective_probes import Probes, seconds_in_turn

Cell = tuple[str, str, int]  # operation, topology, megabytes
Comparison = tuple[float, float]  # the predicted and the measured seconds
SMALLEST_FITTED_BYTES = 1_000_000
SMALL_MEGABYTES = 16  # of what is smaller there are more turns, so that they take as long
Turns = tuple[int, dict[str, list[float]]]  # megabytes; the seconds of the turns of each all-reduce, and of a copy


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
    patient: bool = True
    """make gloo's threads patient, as in the lab's runs; otherwise they run as torch starts them"""
    port: int = 29556
    """where rank 0 listens"""


def compare_with_library(rank: int, world_size: int, settings: Settings, results: "SimpleQueue[Turns]") -> None:
    """One rank: the all-reduces in turn, for each size, and a copy of as many bytes by all ranks at once.

    Rank 0 puts the seconds of all turns into `results`.
    """
    join(rank, world_size, settings.port, settings.patient, "lab" if settings.patient else "gloo")
    library = group_over_gloo(settings.patient)
    for megabytes in settings.megabytes:
        tensor, other = torch.zeros(megabytes * 250_000), torch.zeros(megabytes * 250_000)
        works = {
            "library": partial(dist.all_reduce, tensor, group=library),
            "ring": partial(allreduce_ring, tensor),
            "shared": partial(dist.all_reduce, empty(len(tensor), tensor)),
            "copy": partial(other.copy_, tensor),
        }
        seconds = seconds_in_turn(works, settings.rounds, settings.in_a_row)
        if rank == 0:
            results.put((megabytes, seconds))
    leave(0)


def results_of(rank_of_a_world: Callable[..., None], world_size: int, settings: Settings) -> Iterator[Any]:
    """Start the ranks several times; what rank 0 puts into its queue."""
    results: SimpleQueue[Any] = mp.get_context("spawn").SimpleQueue()
    for _ in each(range(settings.starts), f"starts of {world_size} ranks"):
        ranks = mp.spawn(rank_of_a_world, args=(world_size, settings, results), nprocs=world_size, join=False)
        have_ended = False
        while not have_ended:
            have_ended = ranks.join(timeout=0.1)
            while not results.empty():
                yield results.get()


def measure_all_reduces(world_size: int, settings: Settings) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """The cells of each size, and the seconds of all turns."""
    of_sizes: dict[int, dict[str, list[float]]] = {megabytes: defaultdict(list) for megabytes in settings.megabytes}
    for megabytes, seconds in results_of(compare_with_library, world_size, settings):
        for name, turns in seconds.items():
            of_sizes[megabytes][name] += turns
    for megabytes, of_size in of_sizes.items():
        yield f"| {world_size} | {megabytes} MB ", of_size


def show_ring(cell: str, seconds: dict[str, list[float]]) -> None:
    ours, library = seconds["ring"], seconds["library"]
    low, middle, high = quartiles_of_ratios(library, ours)
    medians = f"| {1e3 * statistics.median(library):.2f} | {1e3 * statistics.median(ours):.2f} "
    print(f"{cell}{medians}| {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)


def show_shared(cell: str, seconds: dict[str, list[float]]) -> None:
    ours = seconds["shared"]
    ratios = quartiles_of_ratios(seconds["library"], ours), quartiles_of_ratios(ours, seconds["copy"])
    columns = [f"{middle:.2f} | {low:.2f} to {high:.2f}" for low, middle, high in ratios]
    print(f"{cell}| {1e3 * statistics.median(ours):.2f} | {' | '.join(columns)} |", flush=True)


def show_all_shared(measured: list[tuple[str, dict[str, list[float]]]]) -> None:
    to_library, to_copy = "speed to the library's (median)", "time over a plain copy (median)"
    print(f"\n| ranks | size | shared memory, ms | {to_library} | quartiles | {to_copy} | quartiles |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for cell, seconds in measured:
        show_shared(cell, seconds)


def compare_with_prediction(
    rank: int, world_size: int, settings: Settings, results: "SimpleQueue[tuple[Cell, Comparison]]"
) -> None:
    """One rank: every operation in every topology, beside what the simulated world says."""
    join(rank, world_size, settings.port, settings.patient, "lab" if settings.patient else "gloo")
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
                if rank == 0:
                    costs = probes.costs(seconds, world_size)
                    world = predict_collective(operation, topology, size_bytes, world_size, costs, settings.in_a_row)
                    comparison = world.makespan / settings.in_a_row, statistics.median(seconds["work"])
                    results.put(((operation, topology, megabytes), comparison))
    leave(0)


def measure_predictions(settings: Settings) -> dict[Cell, list[Comparison]]:
    """Of each operation, topology and size, a comparison of each start."""
    comparisons: dict[Cell, list[Comparison]] = defaultdict(list)
    for cell, comparison in results_of(compare_with_prediction, settings.predicted_world, settings):
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
    print(f"\n| operation | topology | {' | '.join(f'{size} MB' for size in sizes)} |")
    print("|---|---" + "|---" * len(sizes) + "|")
    for names, cells in rows.items():
        print(f"| {' | '.join([*names, *(cells[size] for size in sizes)])} |")
    within = sum(abs(1 / ratio - 1) <= 0.3 for ratio in ratios)
    print(f"\n{within} of {len(ratios)} predictions are within 30 % of what was measured")


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.rounds < 4:
        raise SystemExit(f"--rounds {settings.rounds}: quartiles need at least 4")
    if min(settings.starts, settings.predicted_rounds, settings.in_a_row) < 1:
        raise SystemExit("--starts, --predicted-rounds and --in-a-row: give at least 1")
    if settings.predicted_world < 2:
        raise SystemExit(f"--predicted-world {settings.predicted_world}: in a world of one there is nothing to send")
    if min([*settings.megabytes, *settings.predicted_megabytes], default=1) < 1:
        raise SystemExit("--megabytes and --predicted-megabytes: give at least 1")
    measured: list[tuple[str, dict[str, list[float]]]] = []
    for world_size in settings.worlds:
        for cell, seconds in measure_all_reduces(world_size, settings):
            if not measured:
                to_library = "speed of ours to the library's (median)"
                print(f"| ranks | size | library, ms | our ring, ms | {to_library} | quartiles |")
                print("|---|---|---|---|---|---|", flush=True)
            show_ring(cell, seconds)
            measured.append((cell, seconds))
    if measured and settings.patient:  # what is sent beside shared memory is too little for gloo's threads to matter
        show_all_shared(measured)
    if settings.predicted_megabytes:
        show_predictions(measure_predictions(settings))


if __name__ == "__main__":
    main()
