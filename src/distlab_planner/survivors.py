"""With `--repair`, the memory of the ranks of a run after the death of one of them."""

from distlab.axes.layout import STAGES, layout_size
from distlab.settings.replicas import RepairFlag
from distlab_planner.costs import Costs
from distlab_planner.memory import held


def bytes_after_a_death(args: RepairFlag, split: tuple[int, ...]) -> float:
    """Return the bytes that all ranks of a run hold together, after the death that costs most.

    `split` are the layers of each stage. The ranks keep a copy of the state before an update, and, to add up gradients
    exactly, the gradients of each replica.
    """
    axes = args.layout
    ranks, workers = layout_size(axes), axes.get(STAGES, 1)
    costs = Costs.in_bytes(args, axes, split)
    total = 0.0
    for worker in range(workers):
        one = held(costs, worker)
        state = 2 * (one.parameters + one.optimizer_state) + args.gradient_sums * one.gradients
        total += (state + args.growth() * one.activations) * ranks / workers
    return total
