"""The memory of a rank of a layout, counted as in `distlab.reports.memory`, and the memory of its process."""

import itertools
import math
from dataclasses import dataclass, replace

from distlab.axes.layout import STAGES, layout_size
from distlab.settings.replicas import RepairFlag
from distlab.settings.training import moments_of
from distlab_planner.costs import Costs
from distlab_planner.gathered import gathered_bytes
from distlab_planner.graph import graph_of
from distlab_planner.machine import Machine
from distlab_planner.model import ID_BYTES, NUMBER_BYTES, share

# Freed memory that an allocator keeps, for each byte that is held: fitted to bench/planner.py, on CPUs only. glibc
# does not merge freed tensors whose neighbors in memory are small objects that live on.
KEPT_OF_FREED = {"cpu": 0.3, "cuda": 0.0}
# Additional buffers of the logits' size, not needed by a backward pass: their gradient, and on CPUs the logits, which
# are freed before, but smaller tensors then take their place; in some runs more than once, so this is fitted as well.
OF_LOGITS = {"cpu": 2.5, "cuda": 1}


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank holds at the peak."""

    parameters: int
    gradients: int
    optimizer_state: int
    gathered: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state + self.gathered + self.activations


def held(costs: Costs, worker: int) -> RankMemory:
    """Return the memory of the first rank of a worker of the first replica."""
    layout, program, sizes = costs.layout, costs.layout.programs()[worker], costs.model.sizes
    stages = layout.stages_of(worker)
    step = graph_of(layout)
    kinds = step.kinds[worker]
    changes = {kind: costs.kept_bytes(step.examples[kind]) for kind in step.counts[worker]}
    more = {kind: costs.activations.within(step.examples[kind]) for kind in step.counts[worker]}
    after = list(itertools.accumulate(changes[kind] for kind in kinds))
    within = [kept + more[kind] for kept, kind in zip([0, *after], kinds, strict=False)]
    ids = tables = 0
    if layout.size("cp") == 1:  # of the whole batch, once; ranks that share sequences keep some for each micro-batch
        ids = layout.batch_size * sizes.seq_len * ID_BYTES if 0 in stages else 0
        tables = sizes.table_bytes() if any(layout.parts(stage)["block"] for stage in stages) else 0
    activations = max(*after, *within) + ids + tables
    return replace(held_between_steps(costs, worker), gathered=gathered_bytes(costs, program), activations=activations)


def held_between_steps(costs: Costs, worker: int) -> RankMemory:
    """Return the part of this memory that does not depend on the schedule: parameters, gradients, optimizer state."""
    layout, sizes, stages = costs.layout, costs.model.sizes, costs.layout.stages_of(worker)
    by_holders = costs.weights_by_holders(*stages)
    weights = sum(one.bytes for one in by_holders)
    # Of the experts' scores: parameters without gradients.
    corrections = sum(layout.parts(stage)["block"] for stage in stages) * sizes.experts * NUMBER_BYTES
    own, parameters = costs.updated(*stages) * NUMBER_BYTES, weights
    if layout.shard != "none":
        rounded = sum(one.own_rounded for one in by_holders)
        whole = sum(one.gathered_bytes for one in by_holders)
        # The shards of rounded weights are there twice: in float32, and as they are sent.
        parameters = own + rounded * sizes.inner_bytes if layout.shard == "weights" else whole + rounded * NUMBER_BYTES
    return RankMemory(
        parameters=parameters + corrections,
        gradients=own if layout.shard in ("gradients", "weights") else weights,
        optimizer_state=own * moments_of(costs.optimizer),
    )


def bytes_after_a_death(args: RepairFlag, split: tuple[int, ...]) -> float:
    """Return the bytes that all ranks of a run hold together, after the death that costs most, with `--repair`.

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


def process_bytes(costs: Costs, worker: int, holds: RankMemory) -> float:
    """Return the peak memory of such a rank's process, or its part of its GPU's memory."""
    layout, sizes, machine = costs.layout, costs.model.sizes, costs.machine
    of_logits = 0.0
    if any(layout.parts(stage)["head"] for stage in layout.stages_of(worker)):
        logits_bytes = costs.tokens * share(sizes.vocab_size, layout.size("tp")) * NUMBER_BYTES
        of_logits = OF_LOGITS[machine.device] * logits_bytes
    empty_bytes = machine.process_bytes + machine.compiler_bytes * sizes.compiled
    return empty_bytes + (holds.total + of_logits) * (1 + KEPT_OF_FREED[machine.device])


def share_of_rank(machine: Machine, ranks: int) -> float:
    """Return the bytes of its host's or its GPU's memory for each of `ranks` ranks."""
    on_host = min(ranks, machine.ranks_per_host)
    if machine.device == "cpu":
        return machine.memory_bytes_per_host / on_host
    gpus = machine.cores_per_host  # which the ranks of a host get in turn
    return machine.memory_bytes_per_host / gpus / math.ceil(on_host / gpus)
