"""The memory of a rank of a layout, counted as in `distlab.reports.memory`, and the memory of its process."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from distlab.pipeline.actions import stages_of
from distlab_planner.costs import SHARDED_BUCKET_BYTES, Costs
from distlab_planner.graph import graph_of
from distlab_planner.machine import Machine
from distlab_planner.model import ID_BYTES, NUMBER_BYTES, PARTS, Parameter, share

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
    layout, program, sizes = costs.layout, costs.layout.programs()[worker], costs.model.sizes
    stages = stages_of(program)
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
    return RankMemory(
        parameters=parameters + corrections,
        gradients=own if layout.shard in ("gradients", "weights") else weights,
        optimizer_state=own * MOMENTS[costs.optimizer],
        gathered=_gathered(costs, stages),
        activations=max(*after, *within) + ids + tables,
    )


def process_bytes(costs: Costs, worker: int, holds: RankMemory) -> float:
    """Return the peak memory of such a rank's process, or its part of its GPU's memory."""
    layout, sizes, machine = costs.layout, costs.model.sizes, costs.machine
    of_logits = 0.0
    if any(layout.parts(stage)["head"] for stage in stages_of(layout.programs()[worker])):
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


def _gathered(costs: Costs, stages: Sequence[int]) -> int:
    """Return the bytes of blocks or buckets that are temporarily whole, and of the buffer where they are reduced."""
    layout, on_hosts = costs.layout, costs.on_hosts
    has_buffer = costs.machine.device == "cpu" and on_hosts.is_inside(on_hosts.replicas)  # in shared memory
    if layout.shard == "gradients":
        return sum(_whole_buckets(costs, stage, has_buffer) for stage in stages)
    if layout.shard != "weights":
        return 0
    parts = _parameters(costs, *stages)
    gradients = [sum(one.numbers for one in part) * NUMBER_BYTES for part in parts]
    number_bytes = {True: costs.model.sizes.inner_bytes, False: NUMBER_BYTES}
    weights = [sum(one.numbers * number_bytes[one.is_rounded] for one in part) for part in parts]
    # In a backward pass, a block, its gradient, and the weights of the block before it.
    whole = (own + gradient + before for own, gradient, before in zip(weights, gradients, [0, *weights], strict=False))
    return max(whole) + max(gradients) * has_buffer


def _parameters(costs: Costs, *stages: int) -> list[list[Parameter]]:
    """Return the parameters of each block, and of the embedding and the head, that a rank holds of stages, in order."""
    layout, sizes = costs.layout, costs.model.sizes
    each = {part: sizes.parameters(part, layout.size("tp"), layout.size("ep")) for part in PARTS}
    return [each[part] for stage in stages for part in PARTS for _ in range(layout.parts(stage)[part])]


def _whole_buckets(costs: Costs, stage: int, has_buffer: bool) -> int:
    """Return the bytes of the buckets of a stage's gradients that are whole at once, and of buffers for reducing them.

    Weights that passes round and others are reduced one after the other; experts with other holders have own buckets.
    """
    buckets = list[tuple[bool, Counter[bool]]]()  # whether it has experts of other holders; bytes by whether rounded
    latest: dict[bool, Counter[bool]] = {}  # the open bucket
    for one in reversed(list(itertools.chain.from_iterable(_parameters(costs, stage)))):
        of_others = one.of_expert and costs.layout.size("ep") > 1
        if of_others not in latest or latest[of_others].total() >= SHARDED_BUCKET_BYTES:
            latest[of_others] = Counter()
            buckets.append((of_others, latest[of_others]))
        latest[of_others][one.is_rounded] += one.numbers * NUMBER_BYTES
    if not has_buffer:
        return sum(sorted(bucket.total() for _, bucket in buckets)[-2:])
    whole, longest = Counter[bool](), Counter[bool]()  # the largest bucket, and the largest part of one, of each kind
    for of_others, bucket in buckets:
        whole[of_others] = max(whole[of_others], bucket.total())
        longest[of_others] = max(longest[of_others], *bucket.values())
    return whole.total() + longest.total()
