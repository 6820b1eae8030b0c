"""The settings of runs whose replicas train the whole Llama: data parallelism, in each form."""

import importlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from distlab.axes.layout import STAGES, coordinate, layout_size, name_stages
from distlab.parallel.options import Compression, RepairMode, Sharded
from distlab.settings.common import WorldSize, require_positive
from distlab.settings.resume_policy import ResumePolicy
from distlab.settings.training import TrainSettings, moments_of
from simplellm.errors import FlagError, InputError, require

NO_COPY = "no other rank has the shard of a dead one"


@dataclass
class DataParallelSettings(WorldSize, TrainSettings):
    """A data-parallel training run: `--batch-size` sequences per rank."""

    batch_size: int = 1
    report_every: int = 1
    """print the loss every N steps; in other steps, ranks do not exchange their losses"""

    def check(self) -> None:
        super().check()
        require_positive(self, "report_every")


@dataclass
class GradientAverageSettings(DataParallelSettings):
    """A data-parallel training run whose ranks average whole gradients."""

    lacks: ClassVar[Mapping[str, object]] = {"compress": "none"}


@dataclass
class WrappedSettings(DataParallelSettings):
    """A data-parallel training run whose model is wrapped: every backward pass averages the gradients."""

    def decide(self) -> dict[str, Any]:
        return {**super().decide(), "averages_in_each_pass": True}


@dataclass
class LocalStepsSettings(DataParallelSettings):
    """A data-parallel training run whose ranks take steps with their own gradients."""

    sync_every: Annotated[int, ResumePolicy.SAME_LAYOUT] = 1
    """local steps of each rank between two averages of the weights"""

    @property
    def per_rank_optimizer_state(self) -> bool:
        return self.has_moments and self.world_size > 1

    def check(self) -> None:
        super().check()
        require_positive(self, "sync_every")
        check_no_clipping(self.clip_norm)


@dataclass
class WeightAverageSettings(LocalStepsSettings):
    """A data-parallel training run whose ranks average their weights."""

    def check(self) -> None:
        super().check()
        for name, every in (("--save-every", self.save_every), ("--eval-every", self.eval_every)):
            given = f"{name} {every} with --sync-every {self.sync_every}"
            advice = f"between two averages there is no one model; give a multiple of {self.sync_every}"
            after_an_average = not every or every >= self.steps or every % self.sync_every == 0
            require(after_an_average, f"{given}: {advice}")

    def every_few_steps(self, steps: int) -> int:
        return -(-super().every_few_steps(steps) // self.sync_every) * self.sync_every

    def remarks(self, decided: dict[str, Any]) -> list[str]:
        own = f"only weights are averaged: each rank keeps {self.optimizer}'s moments of its own gradients"
        return [*super().remarks(decided), *([own] if self.has_moments else [])]


@dataclass
class OuterStepSettings:
    """The outer steps of replicas that train independently: DiLoCo."""

    sync_every: Annotated[int, ResumePolicy.FIXED] = 50
    """inner steps of each replica between two exchanges of the same weights"""
    outer_lr: Annotated[float, ResumePolicy.SAME_LAYOUT] = 0.7
    """learning rate of the outer optimizer, SGD with Nesterov momentum"""
    outer_momentum: Annotated[float, ResumePolicy.SAME_LAYOUT] = 0.9
    """momentum of the outer optimizer"""

    def check_exchanges(self, steps: int) -> None:
        """Raise `InputError` if a run of `steps` steps cannot exchange its weights in this way."""
        require_positive(self, "sync_every", "outer_lr")
        given = f"--steps {steps} with --sync-every {self.sync_every}"
        advice = f"some weights would never be exchanged; give at least {self.sync_every} steps"
        require(self.sync_every <= steps, f"{given}: {advice}")
        given = f"--outer-momentum {self.outer_momentum:g}"
        require(0 <= self.outer_momentum < 1, f"{given}: give a number from 0 to less than 1")

    def remarks_on_exchanges(self, steps: int, optimizer: str) -> list[str]:
        """Return the lines to print at the start of such a run."""
        own = [f"each rank keeps {optimizer}'s moments of its own gradients"] if moments_of(optimizer) else []
        rest = steps % self.sync_every
        late = f"the model will lack some of what the last {rest} steps learn; --steps {steps - rest} avoids it"
        return [*own, *([late] if rest else [])]


@dataclass
class OuterSettings(OuterStepSettings):
    """The exchange of weights between such replicas in fragments, while they compute, in few bits: Streaming DiLoCo."""

    fragments: Annotated[int, ResumePolicy.FIXED] = 1
    """equal parts of the weights, which are exchanged one after another, evenly over --sync-every steps"""
    overlap_steps: Annotated[int, ResumePolicy.FIXED] = 0
    """inner steps that are computed while a fragment is exchanged"""
    merge_alpha: Annotated[float, ResumePolicy.SAME_LAYOUT] = 0.5
    """with --overlap-steps: share of a replica's own weights when a fragment arrives; the rest are the outer weights"""
    compress: Annotated[Compression, ResumePolicy.SAME_LAYOUT] = "none"
    """how outer gradients are sent: as float32, bfloat16, or integers of 8 or 4 bits; with error feedback"""

    def check_exchanges(self, steps: int) -> None:
        every, parts, overlap = self.sync_every, self.fragments, self.overlap_steps
        require_positive(self, "sync_every", "fragments")
        given = f"--fragments {parts} with --sync-every {every}"
        advice = f"give a divisor of {every}" if parts <= every else f"give at most {every}"
        require(every % parts == 0, f"{given}: a fragment is exchanged every H / P steps; {advice}")
        interval = every // parts
        sentence = f"a fragment is exchanged every {interval} steps, and must have arrived before the next is sent"
        given = f"--overlap-steps {overlap} with --sync-every {every} and --fragments {parts}"
        require(0 <= overlap < interval, f"{given}: {sentence}; give 0 to {interval - 1}")
        given = f"--merge-alpha {self.merge_alpha:g}"
        require(0 <= self.merge_alpha < 1, f"{given}: give a number from 0 to less than 1")
        super().check_exchanges(steps)


@dataclass
class DiLoCoSettings(OuterStepSettings, LocalStepsSettings):
    """A data-parallel training run with an outer optimizer."""

    lacks: ClassVar[Mapping[str, object]] = {"fragments": 1, "overlap_steps": 0, "compress": "none"}

    def check(self) -> None:
        super().check()
        self.check_exchanges(self.steps)

    def remarks(self, decided: dict[str, Any]) -> list[str]:
        return [*super().remarks(decided), *self.remarks_on_exchanges(self.steps, self.optimizer)]


@dataclass
class StreamingSettings(OuterSettings, DiLoCoSettings):
    """A data-parallel training run with an outer optimizer that exchanges fragments of the weights."""

    lacks: ClassVar[Mapping[str, object]] = {}


@dataclass
class BucketSettings(DataParallelSettings):
    """A data-parallel training run that averages gradients in buckets."""

    all_reduce: Literal["library", "naive", "tree", "butterfly", "ring"] = "library"
    """how to average the gradients: by the library, or by the lab's own all-reduce of this topology, over gloo"""
    compress: Annotated[Literal["none", "powersgd", "topk"], ResumePolicy.SAME_LAYOUT] = "none"
    """how gradients are sent: whole, as products of two thin matrices, or their largest values; with error feedback"""
    powersgd_rank: Annotated[int, ResumePolicy.SAME_LAYOUT] = 4
    """with --compress powersgd: width of the thin matrices"""
    topk_share: Annotated[float, ResumePolicy.SAME_LAYOUT] = 0.01
    """with --compress topk: share of the gradients that is sent"""

    def check(self) -> None:
        super().check()
        if self.all_reduce != "library":
            is_possible = self.backend != "nccl"
            require(is_possible, f"--all-reduce {self.all_reduce} with --backend nccl: it works over gloo only")
            is_possible = self.transport != "shared"
            sentence = "our own work sends over gloo; leave --transport out"
            require(is_possible, f"--all-reduce {self.all_reduce} with --transport shared: {sentence}")
            self.backend = self.transport = "gloo"
        require_positive(self, "powersgd_rank", "topk_share")
        require(self.topk_share <= 1, f"--topk-share {self.topk_share:g}: a share is at most 1")
        if self.compress != "none":
            given = f"--compress {self.compress}"
            is_possible = self.all_reduce == "library"
            require(is_possible, f"{given} with --all-reduce {self.all_reduce}: choose one of the two")


@dataclass
class RepairFlag(TrainSettings):
    """A training run that goes on when a rank dies."""

    repair: RepairMode = "on"
    """whether the others go on when a rank dies: on, with sums in another order; exact, bit for bit the same run"""
    compare_every: int = 100
    """compare the weights of the replicas every N steps; a rank whose weights have changed ends, as if it had died"""

    @property
    def can_repair(self) -> bool:
        return self.repair != "off"

    @property
    def gradient_sums(self) -> int:
        """Number of sums of gradients that a rank keeps: with `exact` one for each replica, to be added up in order."""
        return self.layout["dp"] if self.repair == "exact" else 1

    def why_lost(self, alive: Collection[int]) -> str:
        """Return why the run cannot go on with these ranks only; "" if it can."""
        if not alive:
            return "no rank is left that has the weights"
        for worker in range(self.layout.get(STAGES, 1)):
            if all(coordinate(self.layout, rank, STAGES) != worker for rank in alive):
                return f"no rank is left that holds {name_stages(self.held[worker] if self.held else [worker])}"
        return ""

    def slowdown(self, alive: Collection[int], cores: int) -> float:
        """Return how many times as long as with all ranks a step takes with these ranks only, by the plan."""
        return 1.0

    def growth(self) -> float:
        """Return how many times as many activations as before a rank keeps after the death that costs most."""
        return 1.0

    def check_memory(self, has_bytes: float) -> None:
        """Raise `InputError` if after a death the ranks would hold more than the machine has, as the planner counts.

        Without the planner, nothing is checked.
        """
        try:
            planner = importlib.import_module("distlab_planner.memory")
        except ModuleNotFoundError:
            return
        split = self.decide().get("layers_per_stage", [self.n_layers])
        needed = planner.bytes_after_a_death(self, tuple(split))
        sizes = f"{needed / 1e9:,.1f} GB after a death, and this machine has {has_bytes / 1e9:,.1f} GB"
        advice = "give a smaller model or batch"
        require(needed < has_bytes, f"--repair {self.repair}: all ranks together would hold {sizes}; {advice}")

    def check(self) -> None:
        super().check()
        require_positive(self, "compare_every")
        if self.can_repair:
            try:
                self.check_repair(f"--repair {self.repair}")
            except InputError as error:  # no more than a flag that is missing: the user may not have asked for --repair
                raise FlagError(str(error)) from None

    def check_repair(self, given: str) -> None:
        """Raise `InputError`, which begins with the flag as `given`, if it cannot work with the others."""
        on_cpu = self.device != "cuda" and self.backend != "nccl"
        require(on_cpu, f"{given}: connections over NCCL cannot be left; use --device cpu")
        self.device = "cpu"
        events = f"{given} with --tensorboard: the events of a dead rank would be missing; leave --tensorboard out"
        require(not self.tensorboard, events)


@dataclass
class RepairSettings(DataParallelSettings, RepairFlag):
    """A data-parallel training run that goes on when a rank dies."""

    run_on: bool = False
    """ranks do not wait for the loss at the end of a step; it is printed a step later"""

    lacks: ClassVar[Mapping[str, object]] = {"compress": "none"}

    @property
    def moved_together(self) -> int:
        """Number of a dead rank's micro-batches that go to the same rank: with `exact` all, which have one sum."""
        return self.micro_batches if self.repair == "exact" else 1

    def check(self) -> None:
        super().check()
        check_reports(self.report_every, self.run_on)

    def slowdown(self, alive: Collection[int], cores: int) -> float:
        replicas = layout_size(self.layout)
        parts = replicas * self.micro_batches
        exactly = self.micro_batches * math.ceil(replicas / len(alive))
        busiest = exactly if self.repair == "exact" else math.ceil(parts / len(alive))
        return max(busiest, parts / cores) / max(self.micro_batches, parts / cores)


@dataclass
class ZeRO1Settings(DataParallelSettings):
    """A data-parallel training run whose replicas shard the optimizer's state."""

    no_repair = NO_COPY
    shard: ClassVar[Sharded] = "optimizer"

    def decide(self) -> dict[str, Any]:
        return {**super().decide(), "shards": self.shard}


@dataclass
class ShardedSettings(DataParallelSettings):
    """A data-parallel training run with sharded replicas."""

    no_repair = NO_COPY
    shard: Sharded = "weights"
    """tensors that the replicas shard: the optimizer's state; also the gradients; also the weights (ZeRO 1, 2, 3)"""


def check_reports(report_every: int, run_on: bool) -> None:
    """Raise `InputError` if steps that run on would not be checked."""
    late = f"--report-every {report_every} with --run-on: a step that ran on is checked when its loss arrives"
    require(report_every == 1 or not run_on, f"{late}; leave one of them out")


def check_no_clipping(norm: float | None) -> None:
    """Raise `InputError` if replicas that train independently have to clip the norm of all gradients."""
    advice = "each rank has gradients of its own here, and there is no one norm; leave it out, or average gradients"
    require(norm is None, f"--clip-norm {norm or 0:g}: {advice} (dp-ga)")
