"""The best layouts of a run on a machine."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from distlab_planner.costs import Costs
from distlab_planner.layouts import Choices, layouts
from distlab_planner.machine import Machine
from distlab_planner.memory import held, held_between_steps, process_bytes
from distlab_planner.model import Model
from distlab_planner.step import least_seconds, predict
from distlab_planner.table import Row


@dataclass
class Found:
    """The result of a search."""

    rows: list[Row] = field(default_factory=list)  # the best first
    layouts: int = 0  # their total number
    too_large: int = 0  # of the layouts examined, those that need more memory than there is
    least_bytes: float = float("inf")  # least need of one that is too large
    too_slow: int = 0  # layouts that could not be among the best even if no rank waited


def find_layouts(
    model: Model,
    machine: Machine,
    ranks: int,
    global_batch: int,
    most_bytes: float,
    *,
    optimizer: str = "adam",
    choices: Choices | None = None,
    top: int = 10,
    threads: int | None = None,
    examines: Callable[[int, int], object] = lambda *_: None,
) -> Found:
    """Return the layouts with the shortest steps whose ranks fit in the given number of bytes.

    Promising layouts are simulated first. When no other can be faster than the best so far, even if its ranks never
    waited, the search ends. `threads` is each rank's number from OMP_NUM_THREADS, if it is set. `examines` is called
    before each simulation, with the number of this layout in the order of the search, and their total number.
    """
    found, best = Found(), list[tuple[float, int, Row]]()  # a heap with the slowest of the best first
    queue = []
    for number, layout in enumerate(layouts(model, ranks, global_batch, choices, machine.ranks_per_host)):
        costs = Costs(machine, model, layout, threads, optimizer)
        costs = replace(costs, layout=replace(layout, split=costs.balanced_split()))
        queue.append((least_seconds(costs), number, costs))
    found.layouts = len(queue)
    heapq.heapify(queue)
    while queue:
        least, number, costs = heapq.heappop(queue)
        if len(best) == top and least >= -best[0][0]:
            found.too_slow = len(queue) + 1
            break
        workers = range(costs.layout.size("pp"))
        needed = max(process_bytes(costs, worker, held_between_steps(costs, worker)) for worker in workers)
        if needed > most_bytes and needed >= found.least_bytes:  # whatever its activations
            found.too_large += 1
            continue
        holds = [held(costs, worker) for worker in workers]
        needed = max(process_bytes(costs, worker, of_worker) for worker, of_worker in enumerate(holds))
        if needed > most_bytes:
            found.too_large += 1
            found.least_bytes = min(found.least_bytes, needed)
            continue
        examines(found.layouts - len(queue), found.layouts)
        step = predict(costs)
        entry = (-step.seconds, -number, Row(costs.layout, step, max(of_worker.total for of_worker in holds), needed))
        (heapq.heappush if len(best) < top else heapq.heappushpop)(best, entry)
    found.rows = [row for *_, row in sorted(best, reverse=True)]
    return found
