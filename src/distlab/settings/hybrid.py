"""The settings of runs of several pipelines, whose ranks may also share slices, sequences and experts."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from distlab.axes.layout import Layout, Neighbors, layout_size
from distlab.checkpoints.format import Checkpoint
from distlab.machine.cores import cores as cores_here
from distlab.parallel.options import check_division, check_sharing, padded_length
from distlab.pipeline.plan import Plan, simulate
from distlab.pipeline.rerouting import reroute, step_seconds
from distlab.pipeline.schedules import AUTO
from distlab.settings.common import as_flag, require_positive, shown_as
from distlab.settings.experts import ExpertSettings
from distlab.settings.replicas import OuterSettings, RepairFlag, check_no_clipping, check_reports
from distlab.settings.resume_policy import ResumePolicy
from distlab.settings.resuming import require_same
from distlab.settings.sequences import SharedSequences
from distlab.settings.stages import ScheduleSettings, StageSettings, WrittenScheduleSettings
from simplellm.errors import require
from simplellm.tokenizers import SPTokenizer


@dataclass
class TwoAxes:
    """The layout of several equal pipelines."""

    dp: int = 2
    """replicas of the pipeline"""
    pp: int = 3
    """stages of each pipeline"""

    @property
    def layout(self) -> Layout:
        return {"dp": self.dp, "pp": self.pp}


@dataclass
class PlainHybridSettings(TwoAxes, StageSettings):
    """A run of several equal pipelines, with `--batch-size` sequences each, in which all passes forward come first."""

    casts_messages = False
    schedule: Annotated[Literal["gpipe"], ResumePolicy.SAME_LAYOUT] = "gpipe"
    """order of the forward and backward passes"""
    micro_batches: int = 3
    """parts that the batch is split into"""


@dataclass
class ThreeAxes(TwoAxes):
    """The layout of several equal pipelines whose stages may be split."""

    tp: int = 1
    """ranks that share each stage; each has a slice of every layer"""

    @property
    def layout(self) -> Layout:
        return {**super().layout, "tp": self.tp}


@dataclass
class ThreeAxesSettings(ThreeAxes, WrittenScheduleSettings):
    """A run of several equal pipelines, with `--batch-size` sequences each, whose gradients are averaged."""

    lacks: ClassVar[Mapping[str, object]] = {"outer": "none"}
    may_run_on: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        check_division(self.num_heads, self.num_kv_heads, self.tp)
        require(self.schedule != AUTO, f"--schedule {AUTO}: this script runs written schedules; give another one")
        given = "--run-on: this script's ranks wait for each other at the end of a step; leave it out"
        require(self.may_run_on or not self.run_on, given)


@dataclass
class HybridRepairSettings(ThreeAxesSettings, RepairFlag):
    """A run of several equal pipelines that goes on when a rank dies."""

    may_run_on = True

    def check_repair(self, given: str) -> None:
        super().check_repair(given)
        alone = f"{given} with --dp {self.dp}: a single pipeline has no other that holds its stages"
        require(self.dp > 1, f"{alone}; give --dp 2 or more")
        whole = f"{given} with --recompute all: a dead rank's work would not be recomputed; give --recompute blocks"
        require(self.recompute != "all", whole)
        validated = f"{given} with --eval-every: no pipeline may be whole after a death; leave --eval-every out"
        require(self.eval_every is None, validated)

    def remarks(self, decided: dict[str, Any]) -> list[str]:
        return [*super().remarks(decided), *([self._remark_on_a_death()] if self.can_repair else [])]

    def _remark_on_a_death(self) -> str:
        """Return what the death of a rank would cost: the worst of one in each stage, in a simulation."""
        healthy, *plans = self._plans()
        slower = max(plan.makespan for plan in plans) / healthy.makespan
        most, usual = (max(plan.peak_live) for plan in (max(plans, key=lambda plan: max(plan.peak_live)), healthy))
        kept = f"a rank keeps the activations of up to {most} micro-batches instead of {usual}"
        return f"after a death, a step takes up to {slower:.2f} times as long with a core for each rank, and {kept}"

    def growth(self) -> float:
        healthy, *plans = self._plans()
        return max(max(plan.peak_live) for plan in plans) / max(healthy.peak_live)

    def _plans(self) -> list[Plan]:
        """Return the plan of all workers, and then, for each stage, that after the death of a worker that holds it."""
        everyone = range(self.dp * self.pp)
        return [self._plan([worker for worker in everyone if worker != dead]) for dead in (-1, *range(self.pp))]

    def _plan(self, workers: Sequence[int], cores: float = math.inf) -> Plan:
        """Return the plan of these workers of all pipelines, which share cores."""
        options = self.detour_options(cores)
        return simulate(reroute(self.programs(), self.dp, workers, **options), options["costs"], holders=self.dp)

    def detour_options(self, cores: float | None = None) -> dict[str, Any]:
        """Return keyword arguments for `reroute`; `cores` are those that the workers share, by default this host's."""
        costs = self.pass_costs(SPTokenizer(self.tokenizer).vocab_size)
        cores = cores_here() / self.tp if cores is None else cores
        return {"costs": costs, "whole": self.repair == "exact", "cores": cores}

    def slowdown(self, alive: Collection[int], cores: int) -> float:
        each = cores / self.tp
        groups = (sorted({rank // self.tp for rank in ranks}) for ranks in (alive, range(layout_size(self.layout))))
        now, healthy = (step_seconds(self._plan(workers, each), each) for workers in groups)
        return now / healthy


@dataclass
class HybridSettings(ThreeAxes, SharedSequences, ExpertSettings, OuterSettings, ScheduleSettings):
    """A run of several equal pipelines, with `--batch-size` sequences each, and all options for pipelines."""

    masks_documents = True
    cp: int = 1
    """ranks that share each sequence; each has some of its positions"""
    ep: int = 1
    """replicas, of those that --dp counts, that share the experts; each has some of them"""
    record_routes: Annotated[Path | None, shown_as("DIR", "default: none")] = None
    """with --experts: write there which experts each token had"""
    replay_routes: Annotated[Path | None, shown_as("DIR", "default: none")] = None
    """with --experts: give each token the experts that another run has recorded"""
    neighbors: Annotated[Neighbors, ResumePolicy.SAME_LAYOUT] = "stages"
    """what ranks with neighboring numbers hold: the stages of a pipeline, or the replicas of a stage, so that pipelines
    and not their averages cross a slow link between hosts"""
    shard: Literal["none", "optimizer", "gradients", "weights"] = "none"
    """what the replicas shard, as in dp-fsdp; weights only with --pp 1; gradients saves memory only with schedules that
    do not delay weight gradients"""
    outer: Annotated[Literal["none", "diloco"], ResumePolicy.DEFAULT] = "none"
    """diloco: the pipelines train independently, and an outer optimizer takes steps with their mean change"""
    report_every: int = 1
    """print the loss every N steps; in other steps, pipelines do not exchange their losses"""

    @property
    def layout(self) -> Layout:
        order = ("dp", "pp") if self.neighbors == "stages" else ("pp", "dp")
        replicas = self.dp // self.ep if self.ep > 0 else self.dp  # that hold the same experts
        sizes = {**super().layout, "dp": replicas, "ep": self.ep, "cp": self.cp}
        return {
            axis: sizes[axis] for axis in (*order, "ep", "cp", "tp") if axis not in ("ep", "cp") or sizes[axis] != 1
        }

    @property
    def routes(self) -> tuple[Literal["record", "replay"], Path] | None:
        """Use of the routes in a folder, "record" or "replay", and the folder."""
        if self.record_routes:
            return "record", self.record_routes
        return ("replay", self.replay_routes) if self.replay_routes else None

    @property
    def hidden_per_token(self) -> int | None:
        networks = self.experts_per_token + self.shared_expert
        return networks * (self.hidden_dim or 4 * self.dmodel) if self.experts else self.hidden_dim

    @property
    def positions(self) -> int:
        return padded_length(self.seq_len, self.cp, self.cp_order) // self.cp

    @property
    def per_rank_optimizer_state(self) -> bool:
        return self.outer == "diloco" and self.has_moments and self.dp > 1

    def check(self) -> None:
        require(self.ep > 0 and self.dp % self.ep == 0, f"--ep {self.ep} with --dp {self.dp}: give a divisor of --dp")
        super().check()
        self._check_mixture()
        self._check_outer()
        check_division(self.num_heads, self.num_kv_heads, self.tp)
        given = f"--shard {self.shard}"
        single = f"{given} with --dp 1: a single replica has no others to share with; give --dp 2 or more"
        require(self.shard == "none" or self.dp * self.cp > 1, single)
        check_sharing(self.seq_len, self.num_heads // self.tp, self.cp, self.cp_kind)
        gathers = f"{given} with --pp {self.pp}: each stage would be gathered again for every micro-batch"
        require(self.shard != "weights" or self.pp == 1, f"{gathers}; use --shard optimizer, or --pp 1 with --tp")

    def _check_mixture(self) -> None:
        self.check_experts(self.ep, "--ep")
        for flag, path in (("--record-routes", self.record_routes), ("--replay-routes", self.replay_routes)):
            require(path is None or self.experts > 0, f"{flag}: there are no routes without experts; give --experts")
            require(path is None or self.resume is None, f"{flag} with --resume: routes begin at the first step")
            undone = f"{flag} with --run-on: a step may be taken again, and its routes would be there twice"
            require(path is None or not self.run_on, f"{undone}; leave one of them out")
        is_one = self.record_routes is None or self.replay_routes is None
        require(is_one, "--record-routes with --replay-routes: they would be the same; leave one of them out")
        if not self.experts:
            return
        given, advice = f"--experts {self.experts}", "leave one of them out"
        require(self.outer == "none", f"{given} with --outer {self.outer}: loads are balanced in each step; {advice}")
        padded = f"--seq-len {self.seq_len} with --cp {self.cp} and --experts: padding would count as tokens; give a "
        chunk = padded_length(1, self.cp, self.cp_order)
        require(self.seq_len % chunk == 0, f"{padded}multiple of {chunk}")
        single = (
            f"--shard {self.shard} with --dp {self.dp} and --ep {self.ep}: an expert has a single holder, which has "
        )
        can_shard = self.shard == "none" or self.ep == 1 or self.dp * self.cp > self.ep
        require(can_shard, f"{single}no others to share with; give a smaller --ep")

    def _check_outer(self) -> None:
        require_positive(self, "report_every")
        check_reports(self.report_every, self.run_on)
        if self.outer == "none":
            if self.resume is None:  # a checkpoint of a different script may have these settings
                self._refuse_outer_steps({})
            return
        self.check_exchanges(self.steps)
        check_no_clipping(self.clip_norm)
        given, advice = "--outer diloco", "leave one of them out"
        require(self.shard == "none", f"{given} with --shard {self.shard}: the replicas' weights differ; {advice}")
        sentence = "a step that ran on could not be undone after an outer step"
        require(not self.run_on, f"{given} with --run-on: {sentence}; {advice}")
        if self.compress in ("int8", "int4"):
            differ = (
                f"--compress {self.compress} with --tp {self.tp}: blocks of integers would round what all ranks of a "
            )
            require(self.tp == 1, f"{differ}stage hold differently on each; give --compress bf16, or --tp 1")

    def _refuse_outer_steps(self, saved: dict[str, Any]) -> None:
        """Raise `InputError` for a setting of outer steps that has neither its default nor the value of `saved`."""
        for field in fields(OuterSettings):
            value = getattr(self, field.name)
            given = f"{as_flag(field.name)} {value}"
            is_usual = value in (field.default, saved.get(field.name))
            require(is_usual, f"{given}: pipelines that average gradients have no outer steps; add --outer diloco")

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        super().check_checkpoint(checkpoint)
        saved = checkpoint.record["settings"]
        if self.outer == "none":
            self._refuse_outer_steps(saved)
        if self.outer == saved.get("outer") == "diloco" and self.layout == checkpoint.layout:
            saved = {"neighbors": "stages"} | saved  # older checkpoints do not have it
            # Otherwise a rank would hold different layers.
            for name in ("schedule", "chunks_per_stage", "layers_per_stage", "neighbors"):
                require_same(f"--resume {self.resume}: it was trained with", name, saved[name], getattr(self, name))

    def remarks(self, decided: dict[str, Any]) -> list[str]:
        outer = self.remarks_on_exchanges(self.steps, self.optimizer) if self.outer != "none" else []
        return [*super().remarks(decided), *outer]
