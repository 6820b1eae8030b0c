"""The memory of a rank of a layout, counted as in `distlab.reports.memory`, and the memory of its process."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from distlab.pipeline.actions import stages_of
from distlab_planner.costs import SHARDED_BUCKET_BYTES, Costs
from distlab_planner.graph import graph_of
from distlab_planner.machine import Machine
from distlab_planner.model import ID_BYTES, NUMBER_BYTES, PARTS, share

MOMENTS = {"adam": 2, "adamw": 2, "sgd": 0}  # tensors of the optimizer for each weight
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
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state + self.gathered + self.activations


def held(costs: Costs, worker: int) -> RankMemory:
    """Return the memory of the first rank of a worker of the first replica."""
    layout, program = costs.layout, costs.layout.programs()[worker]
    stages = stages_of(program)
    weights = sum(costs.weights(stage) for stage in stages) * NUMBER_BYTES
    # Of the experts' scores: parameters without gradients.
    corrections = sum(costs.parts(stage)["block"] for stage in stages) * costs.model.sizes.experts * NUMBER_BYTES
    own = costs.own_weights(*stages) * NUMBER_BYTES if layout.shard != "none" else weights
    step = graph_of(layout)
    kinds = step.kinds[worker]
    changes = {kind: costs.kept_bytes(step.examples[kind]) for kind in step.counts[worker]}
    more = {kind: costs.recomputed_bytes(step.examples[kind]) for kind in step.counts[worker]}
    after = list(itertools.accumulate(changes[kind] for kind in kinds))
    within = [kept + more[kind] for kept, kind in zip([0, *after], kinds, strict=False)]
    ids = tables = 0
    if layout.size("cp") == 1:  # of the whole batch, once; ranks that share sequences keep some for each micro-batch
        ids = layout.batch_size * costs.model.sizes.seq_len * ID_BYTES if 0 in stages else 0
        tables = costs.model.sizes.table_bytes() if any(costs.parts(stage)["block"] for stage in stages) else 0
    return RankMemory(
        parameters=(own if layout.shard == "weights" else weights) + corrections,
        gradients=own if layout.shard in ("gradients", "weights") else weights,
        optimizer_state=own * MOMENTS[costs.optimizer],
        gathered=_gathered(costs, stages, weights),
        activations=max(*after, *within) + ids + tables,
    )


def process_bytes(costs: Costs, worker: int, holds: RankMemory) -> float:
    """Return the peak memory of such a rank's process, or its part of its GPU's memory."""
    layout, sizes, machine = costs.layout, costs.model.sizes, costs.machine
    of_logits = 0.0
    if any(costs.parts(stage)["head"] for stage in stages_of(layout.programs()[worker])):
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


def _gathered(costs: Costs, stages: Sequence[int], weights_bytes: int) -> int:
    """Return the bytes of blocks or buckets that are temporarily whole, and of the buffer where they are reduced."""
    layout, on_hosts = costs.layout, costs.on_hosts
    has_buffer = costs.machine.device == "cpu" and on_hosts.is_inside(on_hosts.replicas)  # in shared memory
    if layout.shard == "gradients":
        bucket = min(weights_bytes, SHARDED_BUCKET_BYTES)
        return 2 * bucket if has_buffer else min(weights_bytes, 2 * SHARDED_BUCKET_BYTES)
    if layout.shard != "weights":
        return 0
    in_order = [part for stage in stages for part in PARTS for _ in range(costs.parts(stage)[part])]
    experts = {"block": costs.model.sizes.expert_weights(layout.size("ep"))}
    sizes = [
        (costs.model.sizes.weights(part, layout.size("tp")) + experts.get(part, 0)) * NUMBER_BYTES for part in in_order
    ]
    # In a backward pass, a block, its gradient, and the weights of the block before it.
    whole = max(2 * size + before for size, before in zip(sizes, [0, *sizes], strict=False))
    return whole + max(sizes) * has_buffer
