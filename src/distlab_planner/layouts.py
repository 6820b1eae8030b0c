"""The layouts of a training run, as the flags of `./launch.sh 5d` ask for them."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from distlab.axes.layout import Layout, layout_size, neighbors_of, replicas_in, stride
from distlab.parallel.options import CPKind, CPOrder, check_division, check_sharing, padded_length
from distlab.pipeline.actions import Programs, stages_of
from distlab.pipeline.schedules import (
    AUTO,
    SCHEDULES,
    all_stages,
    schedule_of,
    stages_per_worker,
    with_recomputation,
)
from distlab.pipeline.split import Split, balance
from distlab_planner.model import Dtype, Model, ModelPart
from simplellm.errors import InputError, require
from simplellm.options import BLOCK_BY_BLOCK, Recompute

Shard = Literal["none", "optimizer", "gradients", "weights"]
SHARDS: tuple[Shard, ...] = get_args(Shard)
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
CP_KINDS: tuple[CPKind, ...] = get_args(CPKind)
WHOLE_BLOCKS = "of compiled passes, the planner knows those of whole blocks; leave one of the two out"
Axes = tuple[str, ...]
# The ranks along these axes hold the same weights, and average their gradients.
SAME_WEIGHTS, SAME_EXPERTS = ("dp", "cp", "ep"), ("dp", "cp")
SAME_WITH_ONE = ("naive", "gpipe")  # micro-batch, or one worker, as dapple; gpipe with one worker only keeps more


@dataclass(frozen=True)
class RunLayout:
    """The ranks of a run along each axis, and how they share the work of a step."""

    axes: Layout = field(hash=False)
    batch_size: int  # sequences per pipeline
    micro_batches: int
    schedule: str
    recompute: Recompute
    shard: Shard
    split: Split  # layers of each stage
    cp_kind: CPKind = "ring"
    cp_order: CPOrder = "zigzag"
    residual: Dtype = "float32"  # of the stream between norms and layers
    sequence_parallel: bool = False  # slices hold parts of the sequences between attention and feed-forward layers

    @classmethod
    def of(cls, settings: Any, axes: Layout, split: Split) -> "RunLayout":
        """Return the layout of a run with these settings; one that its script lacks has its usual value."""
        return cls(
            axes,
            settings.batch_size,
            settings.micro_batches,
            schedule=getattr(settings, "schedule", "naive"),
            recompute=settings.recompute,
            shard=getattr(settings, "shard", "none"),
            split=split,
            cp_kind=getattr(settings, "cp_kind", "gather"),
            cp_order=getattr(settings, "cp_order", "contiguous"),
            residual=getattr(settings, "residual", "float32"),
            sequence_parallel=getattr(settings, "sequence_parallel", False),
        )

    def size(self, *axes: str) -> int:
        """Return the number of ranks along an axis, or along several."""
        return math.prod(self.axes.get(axis, 1) for axis in axes)

    @property
    def recomputes_blocks(self) -> bool:
        """True if backward passes compute blocks again, one by one."""
        return self.recompute in BLOCK_BY_BLOCK

    @property
    def keeps_attention(self) -> bool:
        return self.recompute == "except-attention"

    def computes_blocks_again(self, letter: str) -> bool:
        """Return whether actions of a kind are backward passes that compute blocks again.

        Their last product, which only the output needs, is left out; the bookkeeping takes up the saved time.
        """
        return letter in "bi" or (letter in "BI" and self.recomputes_blocks)

    def parts(self, stage: int) -> dict[ModelPart, int]:
        """Return how many of each part of the model a stage holds."""
        return {"embedding": int(stage == 0), "block": self.split[stage], "head": int(stage == len(self.split) - 1)}

    @property
    def outline(self) -> "Outline":
        """The owners of the stages and the letters of the actions in the schedule."""
        return outline_of(self.schedule, self.size("pp"))

    def stages_of(self, worker: int) -> list[int]:
        """Return the stages that a worker holds."""
        return [stage for stage, owner in self.outline.owners.items() if owner == worker]

    def is_handed_over(self, stage: int) -> bool:
        """Return whether the worker of a stage also holds the stage before, and so gets its input without a message."""
        owners = self.outline.owners
        return stage > 0 and owners[stage] == owners[stage - 1]

    def follows_own_blocks(self, stage: int) -> bool:
        """Return whether the worker of a stage also holds an earlier one with blocks, whose passes enclose its own."""
        owners = self.outline.owners
        return any(owners[earlier] == owners[stage] and self.split[earlier] for earlier in range(stage))

    @functools.cached_property
    def ranks(self) -> int:
        return layout_size(self.axes)

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch."""
        return self.batch_size // self.micro_batches

    def first_rank(self, worker: int) -> int:
        """Return the first rank of a worker of the first replica."""
        return worker * stride(self.axes, "pp")

    def programs(self) -> Programs:
        """Return every worker's actions, in order."""
        return programs_of(self.schedule, self.size("pp"), self.micro_batches, self.recompute == "all")

    @property
    def not_compiled(self) -> str | None:
        """The flag with which a run with `--compile` does not compile whole blocks; None if it does."""
        for axis in ("tp", "cp"):
            if self.size(axis) > 1:
                return f"--{axis} {self.size(axis)}"
        if "W" in self.outline.letters:
            return f"--schedule {self.schedule}"
        if self.recompute == "except-attention":
            return f"--recompute {self.recompute}"
        return "--shard weights" if self.shard == "weights" else None

    def flags(self, model: Model) -> str:
        """Return the flags for `./launch.sh 5d` that differ from the defaults."""
        sizes = {"dp": replicas_in(self.axes), "pp": self.size("pp"), "tp": self.size("tp")}
        flags = " ".join(f"--{axis} {size}" for axis, size in sizes.items())
        flags += f" --ep {self.size('ep')}" * (self.size("ep") > 1)
        flags += f" --batch-size {self.batch_size} --micro-batches {self.micro_batches}"
        flags += " --neighbors replicas" * (neighbors_of(self.axes) == "replicas")
        if self.size("cp") > 1:
            flags += f" --cp {self.size('cp')} --cp-kind {self.cp_kind}"
            flags += f" --cp-order {self.cp_order}" * (self.cp_order != "zigzag")
        if self.size("pp") > 1:
            flags += f" --schedule {self.schedule}"
            if self.split != default_split(model, len(self.split)):
                flags += f" --layers-per-stage {','.join(map(str, self.split))}"
        flags += f" --recompute {self.recompute}" * (self.recompute != "none")
        return flags + f" --shard {self.shard}" * (self.shard != "none")

    def __str__(self) -> str:
        """Return the layout as shown in a table."""
        kinds = {"cp": f" ({self.cp_kind})"}
        words = [f"{size} {name}{kinds.get(name, '')}" for name, size in sorted(self.axes.items()) if size > 1]
        return (" x ".join(words) or "one rank") + ", replicas together" * (neighbors_of(self.axes) == "replicas")


@dataclass(frozen=True)
class Choices:
    """The options of a plan; an empty one stands for all."""

    # Their sizes; for "cp" and "ep", an empty one stands for 1. Those of "dp" are of all replicas.
    axes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    cp_kinds: Sequence[CPKind] = ()
    micro_batches: Sequence[int] = ()
    schedules: Sequence[str] = ()
    recompute: Sequence[Recompute] = ()
    shard: Sequence[Shard] = ()


def layouts(
    model: Model, ranks: int, global_batch: int, choices: Choices | None = None, ranks_per_host: int | None = None
) -> Iterator[RunLayout]:
    """Yield all layouts of this number of ranks that `./launch.sh 5d` accepts.

    Replicas of a stage are neighbors only where that divides the pipelines between hosts, but not the replicas.
    The schedule `auto` is left out, because its order is found when the run begins, and so are duplicates: with one
    micro-batch, or without a pipeline, some schedules are the same.
    """
    among = choices or Choices()
    for axes, kind in _sizes_of_axes(model, ranks, among):
        batch_size, left = divmod(global_batch, replicas_in(axes))
        if left:
            continue
        for micro_batches, schedule, split in _schedules(model, axes["pp"], batch_size, among):
            for recompute, shard in itertools.product(among.recompute or RECOMPUTE, among.shard or SHARDS):
                has_copies = axes["dp"] * axes.get("cp", 1) > 1  # of each expert, without which no run shards
                if (shard != "none" and not has_copies) or (shard == "weights" and axes["pp"] > 1):
                    continue
                one = RunLayout(axes, batch_size, micro_batches, schedule, recompute, shard, split, kind)
                if model.sizes.compiled and one.not_compiled:
                    continue
                yield one
                if ranks_per_host and _divides_pipelines_only(one, ranks_per_host):
                    yield replace(one, axes={"pp": axes["pp"]} | {n: size for n, size in axes.items() if n != "pp"})


def _sizes_of_axes(model: Model, ranks: int, among: Choices) -> Iterator[tuple[Layout, CPKind]]:
    """Yield the axes of each layout, and how its ranks share sequences; "cp" and "ep" only if they have ranks."""
    kinds, experts = among.cp_kinds or CP_KINDS, model.sizes.experts
    shared = [(cp, kind) for cp in among.axes.get("cp") or (1,) for kind in (kinds if cp > 1 else CP_KINDS[:1])]
    eps = [ep for ep in among.axes.get("ep") or (1,) if ep == 1 or experts % ep == 0 < experts]
    for pp, tp, (cp, kind), ep in itertools.product(divisors(ranks), divisors(ranks), shared, eps):
        replicas, left = divmod(ranks, pp * tp * cp)
        sizes = {"dp": replicas, "pp": pp, "ep": ep, "cp": cp, "tp": tp}
        is_chosen = all(sizes[name] in some for name, some in among.axes.items() if some)
        if is_chosen and not left and replicas % ep == 0 and _divides(model, tp, cp, kind):
            sizes["dp"] = replicas // ep
            yield {name: size for name, size in sizes.items() if name not in ("cp", "ep") or size > 1}, kind


def _schedules(model: Model, workers: int, batch_size: int, among: Choices) -> Iterator[tuple[int, str, Split]]:
    """Yield numbers of micro-batches with the schedules that fit them, and the layers of each stage."""
    names = among.schedules or [name for name in SCHEDULES if name != AUTO]
    for micro_batches in among.micro_batches or divisors(batch_size):
        if batch_size % micro_batches:
            continue
        for name in names if workers > 1 else ["dapple"]:
            is_same = micro_batches == 1 and name in SAME_WITH_ONE and "dapple" in names
            if is_same or not schedule_of(name).fits(workers, micro_batches):
                continue
            try:
                split = default_split(model, workers * stages_per_worker(name))
            except InputError:  # more stages than the model has parts
                continue
            yield micro_batches, name, split


def _divides_pipelines_only(layout: RunLayout, ranks_per_host: int) -> bool:
    """Return whether neighboring replicas divide the pipelines between hosts, but not the replicas of a stage."""
    replicas = replicas_in(layout.axes)
    has_hosts = layout.ranks > ranks_per_host
    return has_hosts and replicas > 1 and ranks_per_host % (replicas * layout.size("cp") * layout.size("tp")) == 0


@functools.lru_cache(maxsize=64)
def programs_of(schedule: str, workers: int, micro_batches: int, recompute: bool) -> Programs:
    """Return every worker's actions in a schedule, with or without recomputation as actions of their own."""
    programs = all_stages(schedule, workers, micro_batches)
    return with_recomputation(programs) if recompute else programs


@dataclass(frozen=True)
class Outline:
    """The part of a schedule that does not depend on the number of micro-batches."""

    owners: dict[int, int]  # by stage, its worker
    letters: frozenset[str]  # of its actions


@functools.cache
def outline_of(schedule: str, workers: int) -> Outline:
    fits = schedule_of(schedule).fits
    fewest = next(count for count in itertools.count(1) if fits(workers, count))
    programs = all_stages(schedule, workers, fewest)
    owners = {stage: worker for worker, program in enumerate(programs) for stage in stages_of(program)}
    return Outline(owners, frozenset(action.letter for program in programs for action in program))


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


@functools.lru_cache(maxsize=1024)
def default_split(model: Model, stages: int) -> Split:
    """Return the layers of each stage that a run takes without `--layers-per-stage`."""
    return balance(model.n_layers, stages, model.sizes.parts)


def _divides(model: Model, tp: int, cp: int, kind: CPKind) -> bool:
    sizes = model.sizes
    is_padded = padded_length(sizes.seq_len, cp, RunLayout.cp_order) > sizes.seq_len
    try:
        check_division(sizes.num_heads, sizes.num_kv_heads, tp)
        check_sharing(sizes.seq_len, sizes.num_heads // tp, cp, kind)
        require(sizes.vocab_size >= tp and not (sizes.experts and is_padded), "")
    except InputError:
        return False
    return True
