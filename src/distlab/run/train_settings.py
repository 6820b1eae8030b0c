"""The settings of runs that train the lab's Llama, in each kind of layout."""

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from distlab.checkpoints.format import LLAMA, Checkpoint
from distlab.comm.layout import Layout, Neighbors, layout_flags, layout_size
from distlab.parallel.division import Compression, Sharded, check_division
from distlab.pipeline.actions import ActionCosts, stages_of
from distlab.pipeline.auto import Limit, read_limit
from distlab.pipeline.schedules import DEFAULT_CHUNKS, all_stages, check_schedule, schedule_names, stages_per_worker
from distlab.pipeline.split import PartCosts, Split, balance, estimated_costs, multiply_adds, read_split
from distlab.run import resume
from distlab.run.learning_rate import LRSchedule, learning_rate
from distlab.run.resume import ResumePolicy
from distlab.run.settings import ResumableSettings, WorldSize, as_flag, require_positive, shown_as
from simplellm.errors import InputError, require
from simplellm.options import Recompute, check_heads
from simplellm.sources import choose_source, open_source
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

if TYPE_CHECKING:
    from distlab.run.logs import StepTime
    from distlab.run.prediction import Prediction

BETAS = (0.9, 0.999)  # torch's default
MOST_LAYERS, MOST_TOKENS = 1000, 2**24  # larger numbers are taken for typing errors, as with `MOST_RANKS`


@dataclass
class TrainSettings(ResumableSettings):
    """A training run of the lab's Llama."""

    architecture = LLAMA

    seed: Annotated[int, ResumePolicy.DEFAULT] = 0
    """seed of the initial weights and of the data"""
    steps: int = 5000
    """optimizer steps"""
    batch_size: Annotated[int, ResumePolicy.PER_REPLICA] = 3
    """sequences per step for one model replica"""
    micro_batches: Annotated[int, ResumePolicy.SAME_LAYOUT] = 1
    """parts that the batch is split into"""
    seq_len: Annotated[int, ResumePolicy.DEFAULT] = 256
    """tokens per sequence"""
    dmodel: Annotated[int, ResumePolicy.MODEL] = 288
    """width of the model"""
    num_heads: Annotated[int, ResumePolicy.MODEL] = 6
    """attention heads"""
    num_kv_heads: Annotated[int | None, shown_as("INT", "default: as many as --num-heads")] = None
    """key and value heads, each shared by the same number of attention heads (grouped-query attention)"""
    hidden_dim: Annotated[int | None, ResumePolicy.MODEL, shown_as("INT", "default: 4 times --dmodel")] = None
    """width of the feed-forward layers"""
    n_layers: Annotated[int, ResumePolicy.MODEL] = 6
    """transformer layers"""
    lr: Annotated[float, ResumePolicy.DEFAULT] = 8e-4
    """learning rate"""
    optimizer: Annotated[Literal["adam", "adamw", "sgd"], ResumePolicy.FIXED] = "adam"
    """update rule"""
    clip_norm: Annotated[float | None, ResumePolicy.DEFAULT, shown_as("FLOAT", "default: no clipping")] = None
    """largest norm of all gradients together; if it is larger, all of them are scaled down"""
    betas: Annotated[tuple[float, float], ResumePolicy.DEFAULT, shown_as("FLOAT FLOAT", "default: 0.9 0.999")] = BETAS
    """decay rates of adam's and adamw's moving averages of the gradient and of its square"""
    weight_decay: Annotated[float | None, ResumePolicy.DEFAULT, shown_as("FLOAT", "default: 0; 0.01 with adamw")] = None
    """weight decay, of matrices only"""
    warmup_steps: Annotated[int, ResumePolicy.DEFAULT] = 0
    """steps over which the learning rate rises to --lr"""
    lr_schedule: Annotated[LRSchedule, ResumePolicy.DEFAULT] = "constant"
    """how the learning rate falls from --lr to --min-lr between the warm-up and the last step"""
    min_lr: Annotated[float, ResumePolicy.DEFAULT] = 0.0
    """learning rate at the end of --lr-schedule cosine or linear"""
    dtype: Annotated[Literal["float32", "bfloat16"], ResumePolicy.DEFAULT] = "float32"
    """bfloat16 computes in mixed precision"""
    recompute: Recompute = "none"
    """activations that the backward pass computes again: the inside of each block, or all that it can (less memory)"""
    data: Annotated[str, tyro.conf.arg(metavar="auto|sample|tinystories|FILE")] = "auto"
    """stories: the generator (sample), the hub's data set (tinystories), or a .txt, .jsonl or .parquet file"""
    tokenizer: Annotated[Path | None, shown_as("FILE", "default: the shipped one")] = None
    """a SentencePiece model"""
    eval_every: Annotated[int | None, shown_as("INT", "default: never")] = None
    """evaluate on the validation split every N steps"""
    eval_sequences: int = 24
    """sequences of the validation split to evaluate on"""
    machine: Annotated[Path | None, shown_as("FILE", "default: no prediction")] = None
    """machine, as python -m distlab.calibrate writes it: print what a step should take, and at the end what it took"""
    trace: bool = False
    """record the timeline, and draw it at the end of the run"""
    tensorboard: bool = False
    """also write the records for TensorBoard, in the run's folder"""

    @property
    def length(self) -> tuple[str, int]:
        return f"--steps {self.steps}", self.steps

    @property
    def tokenizer_model(self) -> Path:
        return self.tokenizer or SHIPPED_MODEL

    @property
    def data_identity(self) -> dict[str, Any] | None:
        if self.data in ("sample", "tinystories"):
            return {"source": self.data} | ({"seed": self.seed} if self.data == "sample" else {})
        return None if self.data == "auto" else resume.file_identity(self.data)

    def decide(self) -> dict[str, Any]:
        source, why = choose_source(self.data)
        if self.prediction is not None:
            from distlab.comm.devices import pick_device_type  # imports torch, which settings alone do not need

            self.prediction.check_device(pick_device_type(self.device))
        return {"data": source, "data_because": why, "data_identity": replace(self, data=source).data_identity}

    def remarks(self, decided: dict[str, Any]) -> list[str]:
        predicted = [self.prediction.sentence] if self.prediction else []
        return [f"stories from {decided['data_because']}", *self._lr_remarks(), *predicted]

    def remarks_at_the_end(self, times: "Sequence[StepTime]") -> list[str]:
        return list(self.prediction.beside(times)) if self.prediction and times else []

    @functools.cached_property
    def prediction(self) -> "Prediction | None":
        """With `--machine`, what a step should take; `InputError` if the planner cannot know it.

        The file is read once: when the run ends, hours later, it may have changed.
        """
        if self.machine is None:
            return None
        sentence = f"--machine {self.machine}: there is no such file; python -m distlab.calibrate FILE writes one"
        require(os.path.isfile(self.machine), sentence)
        from distlab.run.prediction import Prediction

        return Prediction.of(self, self.machine)

    def _lr_remarks(self) -> list[str]:
        """Lines to print about a learning rate that changes."""
        parts = [f"rises to {self.lr:g} over {self.warmup_steps:,} steps"] if self.warmup_steps else []
        if self.lr_schedule != "constant":
            curve = "half a cosine" if self.lr_schedule == "cosine" else "a line"
            parts.append(f"falls from {self.lr:g} to {self.min_lr:g} along {curve}, until step {self.steps:,}")
        return [f"the learning rate {' and then '.join(parts)}"] if parts else []

    def remarks_on_resuming(self, checkpoint: Checkpoint) -> list[str]:
        before = checkpoint.record["settings"].get("steps", self.steps)
        if self.lr_schedule == "constant" or before == self.steps:
            return []
        lrs = [replace(self, steps=steps).learning_rate(checkpoint.step) for steps in (before, self.steps)]
        sentence = f"the learning rate now falls until step {self.steps:,}, not {before:,}"
        return [f"{sentence}: it is now {lrs[1]:.3g} instead of {lrs[0]:.3g}; --steps sets it"]

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step."""
        return learning_rate(step, self.steps, self.lr, self.warmup_steps, self.lr_schedule, self.min_lr)

    def saved_values(self, checkpoint: Checkpoint) -> dict[str, Any]:
        values, model = super().saved_values(checkpoint), checkpoint.record["model"]
        values.setdefault("seq_len", min(self.seq_len, model["ctx_size"]))  # an imported model has no settings
        values["num_kv_heads"] = None if model["num_kv_heads"] == model["num_heads"] else model["num_kv_heads"]
        if values.get("batch_size", 0) % max(1, values.get("micro_batches", self.micro_batches)):
            del values["batch_size"]  # from another layout, with another number of micro-batches
        if not resume.has_tokenizer(checkpoint, SHIPPED_MODEL):
            values["tokenizer"] = checkpoint.tokenizer
        return values

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        super().check_checkpoint(checkpoint)
        flag, model = f"--resume {self.resume}", checkpoint.record["model"]
        num_kv_heads = self.num_kv_heads or self.num_heads
        resume.require_same(f"{flag}: its model has", "num_kv_heads", model["num_kv_heads"], num_kv_heads)
        most, has, reads = model["ctx_size"], model["vocab_size"], SPTokenizer(self.tokenizer).vocab_size
        require(self.seq_len <= most, f"{flag}: its model reads {most} tokens at most, not --seq-len {self.seq_len}")
        require(has == reads, f"{flag}: its model has {has} tokens but its tokenizer has {reads}")
        same_ranks = self.per_rank_optimizer_state and self.layout == checkpoint.layout
        ranks, advice = layout_size(checkpoint.layout), f"the same script and {layout_flags(checkpoint.layout)}"
        sentence = f"each of its {ranks} ranks kept {self.optimizer}'s moments of its own gradients, which cannot "
        sentence += f"be used in another layout; resume with {advice}"
        require(same_ranks or not checkpoint.per_rank_optimizer_state, f"{flag}: {sentence}")

    def check(self) -> None:
        super().check()
        sizes = "dmodel num_heads num_kv_heads hidden_dim n_layers"
        require_positive(
            self, *f"steps batch_size micro_batches {sizes} lr clip_norm eval_every eval_sequences".split()
        )
        require(self.n_layers <= MOST_LAYERS, f"--n-layers {self.n_layers}: give at most {MOST_LAYERS:,}")
        for flag, sequences in (("--batch-size", self.batch_size), ("--eval-sequences", self.eval_sequences)):
            tokens, given = sequences * self.seq_len, f"{flag} {sequences} with --seq-len {self.seq_len}"
            require(tokens <= MOST_TOKENS, f"{given}: {tokens:,} tokens at a time; give at most {MOST_TOKENS:,}")
        self._check_recipe()
        require(self.seq_len > 1, f"--seq-len {self.seq_len}: predicting the next token needs at least 2")
        check_heads(self.dmodel, self.num_heads, self.num_kv_heads)
        rows, parts = self.batch_size, self.micro_batches
        advice = f"the batch must divide into equal micro-batches; give a multiple of {parts}"
        require(rows % parts == 0, f"--batch-size {rows} with --micro-batches {parts}: {advice}")
        SPTokenizer(self.tokenizer)
        _ = self.prediction  # raises `InputError` for what the planner does not know
        if self.data not in ("auto", "tinystories"):
            for split in ("train", "validation") if self.eval_every else ("train",):
                next(open_source(self.data, split, self.seed).documents(0))

    def _check_recipe(self) -> None:
        decay, betas = self.weight_decay, " ".join(map(str, self.betas))
        require(decay is None or 0 <= decay < math.inf, f"--weight-decay {decay}: give 0 or more")
        are_shares = all(0 <= beta < 1 for beta in self.betas)
        require(are_shares, f"--betas {betas}: give two numbers from 0 to less than 1")
        has_moments = self.optimizer != "sgd" or self.betas == BETAS
        require(has_moments, f"--betas {betas} with --optimizer sgd: only adam and adamw have moments")
        warmup, given = self.warmup_steps, f"--warmup-steps {self.warmup_steps}"
        require(warmup >= 0, f"{given}: give 0 or more")
        require(warmup <= self.steps, f"{given} with --steps {self.steps}: the warm-up must end within the run")
        given = f"--min-lr {self.min_lr:g}"
        require(0 <= self.min_lr <= self.lr, f"{given} with --lr {self.lr:g}: give 0 or more, and at most --lr")


@dataclass
class DataParallelSettings(WorldSize, TrainSettings):
    """A data-parallel training run: `--batch-size` sequences per rank."""

    batch_size: int = 1
    report_every: int = 1
    """print the loss every N steps; in the others, ranks do not tell each other their losses"""

    def check(self) -> None:
        super().check()
        require_positive(self, "report_every")


@dataclass
class LocalStepsSettings(DataParallelSettings):
    """A data-parallel training run whose ranks take steps with their own gradients."""

    sync_every: Annotated[int, ResumePolicy.SAME_LAYOUT] = 1
    """local steps of each rank between two averages of the weights"""

    @property
    def per_rank_optimizer_state(self) -> bool:
        return self.optimizer != "sgd" and self.world_size > 1

    def check(self) -> None:
        super().check()
        require_positive(self, "sync_every")
        check_no_clipping(self.clip_norm)


@dataclass
class OuterSettings:
    """How replicas that train on their own exchange what they have learned: DiLoCo, Streaming DiLoCo."""

    sync_every: Annotated[int, ResumePolicy.FIXED] = 50
    """inner steps of each replica between two exchanges of the same weights"""
    fragments: Annotated[int, ResumePolicy.FIXED] = 1
    """equal parts of the weights, which are exchanged one after another, evenly over --sync-every steps"""
    overlap_steps: Annotated[int, ResumePolicy.FIXED] = 0
    """inner steps that are computed while a fragment is exchanged"""
    merge_alpha: Annotated[float, ResumePolicy.SAME_LAYOUT] = 0.5
    """with --overlap-steps: share of a replica's own weights when a fragment arrives; the rest are the outer weights"""
    outer_lr: Annotated[float, ResumePolicy.SAME_LAYOUT] = 0.7
    """learning rate of the outer optimizer, SGD with Nesterov momentum"""
    outer_momentum: Annotated[float, ResumePolicy.SAME_LAYOUT] = 0.9
    """momentum of the outer optimizer"""
    compress: Annotated[Compression, ResumePolicy.SAME_LAYOUT] = "none"
    """how outer gradients are sent: as float32, bfloat16, or integers of 8 or 4 bits; with error feedback"""

    def check_exchanges(self, steps: int) -> None:
        """Raise `InputError` if a run of so many steps cannot exchange its weights like this."""
        every, parts, overlap = self.sync_every, self.fragments, self.overlap_steps
        require_positive(self, "sync_every", "fragments", "outer_lr")
        given = f"--fragments {parts} with --sync-every {every}"
        advice = f"give a divisor of {every}" if parts <= every else f"give at most {every}"
        require(every % parts == 0, f"{given}: a fragment is exchanged every H / P steps; {advice}")
        interval = every // parts
        sentence = f"a fragment is exchanged every {interval} steps, and must have arrived before the next is sent"
        given = f"--overlap-steps {overlap} with --sync-every {every} and --fragments {parts}"
        require(0 <= overlap < interval, f"{given}: {sentence}; give 0 to {interval - 1}")
        given = f"--steps {steps} with --sync-every {every}"
        require(every <= steps, f"{given}: some weights would never be exchanged; give at least {every} steps")
        for flag, share in (("--merge-alpha", self.merge_alpha), ("--outer-momentum", self.outer_momentum)):
            require(0 <= share < 1, f"{flag} {share:g}: give a number from 0 to less than 1")

    def remarks_on_exchanges(self, steps: int, optimizer: str) -> list[str]:
        """Lines to print at the start of such a run."""
        own = [f"each rank keeps {optimizer}'s moments of its own gradients"] if optimizer != "sgd" else []
        rest = steps % self.sync_every
        late = f"the model will lack some of what the last {rest} steps learn; --steps {steps - rest} avoids it"
        return [*own, *([late] if rest else [])]


@dataclass
class DiLoCoSettings(OuterSettings, LocalStepsSettings):
    """A data-parallel training run with an outer optimizer."""

    def check(self) -> None:
        super().check()
        self.check_exchanges(self.steps)

    def remarks(self, decided: dict[str, Any]) -> list[str]:
        return [*super().remarks(decided), *self.remarks_on_exchanges(self.steps, self.optimizer)]


@dataclass
class ByHandSettings(DataParallelSettings):
    """A data-parallel training run that may average with a handwritten collective."""

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
class ShardedSettings(DataParallelSettings):
    """A data-parallel training run with sharded replicas."""

    shard: Sharded = "optimizer"
    """what the replicas shard: the optimizer's state; the gradients too; the weights too (ZeRO 1, 2, 3)"""


@dataclass
class StageSettings(TrainSettings):
    """A training run whose model is divided into stages, each with some of the layers."""

    layers_per_stage: Annotated[str | None, ResumePolicy.SAME_LAYOUT, shown_as("N,N,...", "default: balanced")] = None
    """layers of each stage, e.g. 3,2,1"""
    run_on: bool = False
    """ranks do not wait for each other at the end of a step; its loss is printed a step later"""

    def check(self) -> None:
        super().check()
        self.split(SPTokenizer(self.tokenizer).vocab_size)

    def decide(self) -> dict[str, Any]:
        return {**super().decide(), "layers_per_stage": self.split(SPTokenizer(self.tokenizer).vocab_size)}

    def remarks(self, decided: dict[str, Any]) -> list[str]:
        layers = ", ".join(map(str, decided["layers_per_stage"]))
        return [*super().remarks(decided), f"layers of each stage: {layers}"]

    @property
    def stages(self) -> int:
        """Number of stages of the model."""
        return self.layout["pp"]

    def split(self, vocab_size: int) -> Split:
        """The layers of each stage: those of `--layers-per-stage`, or balanced."""
        stages = self.stages
        if self.layers_per_stage is not None:
            return read_split(self.layers_per_stage, self.n_layers, stages)
        return balance(self.n_layers, stages, self._parts(vocab_size))

    def pass_costs(self, vocab_size: int) -> ActionCosts:
        """Estimates of what the passes of each stage cost, relative to each other."""
        return estimated_costs(self.split(vocab_size), self._parts(vocab_size), self.recompute == "blocks")

    def _parts(self, vocab_size: int) -> PartCosts:
        return multiply_adds(
            vocab_size=vocab_size,
            dmodel=self.dmodel,
            seq_len=self.seq_len,
            hidden_dim=self.hidden_dim,
            kv_width=self.dmodel // self.num_heads * (self.num_kv_heads or self.num_heads),
        )


@dataclass
class StagePerRank(WorldSize):
    """The layout of a single pipeline, in which every rank is a stage."""

    world_size: int = 3
    """ranks, each a stage of the model"""

    @property
    def layout(self) -> Layout:
        return {"pp": self.world_size}


@dataclass
class PipelineSettings(StagePerRank, StageSettings):
    """A run of one pipeline in which each batch completes its forward and backward pass before the next one starts."""

    one_stage_at_a_time = True


@dataclass
class ScheduleSettings(StageSettings):
    """A run whose stages follow a pipeline schedule."""

    schedule: Annotated[str, ResumePolicy.SAME_LAYOUT, tyro.conf.arg(metavar="|".join(schedule_names()))] = "dapple"
    """order of the forward and backward passes"""
    chunks_per_stage: Annotated[int, ResumePolicy.SAME_LAYOUT] = DEFAULT_CHUNKS
    """with --schedule interleaved or auto: stages that each rank holds; auto: 1 or 2"""
    keep_at_most: Annotated[
        str | None, ResumePolicy.SAME_LAYOUT, shown_as("N|SIZE", "default: as many micro-batches as workers")
    ] = None
    """with --schedule auto: activations that a rank keeps at most, in micro-batches (6) or bytes (200MB)"""
    micro_batches: int = 3
    """parts that the batch is split into"""

    def check(self) -> None:
        names = schedule_names()
        require(self.schedule in names, f"--schedule {self.schedule}: give one of {', '.join(names)}")
        require_positive(self, "chunks_per_stage")
        super().check()
        check_schedule(self.schedule, self.layout["pp"], self.micro_batches, self.chunks_per_stage, self.limit)

    @property
    def limit(self) -> Limit | None:
        """What `--keep-at-most` asks for."""
        return None if self.keep_at_most is None else read_limit(self.keep_at_most)

    @property
    def stages(self) -> int:
        return self.layout["pp"] * stages_per_worker(self.schedule, self.chunks_per_stage)

    @property
    def held(self) -> list[list[int]]:
        workers = all_stages(self.schedule, self.layout["pp"], self.micro_batches, self.chunks_per_stage)
        return [stages_of(program) for program in workers]


@dataclass
class ScheduledPipelineSettings(StagePerRank, ScheduleSettings):
    """A run of one pipeline that follows a schedule."""


def check_no_clipping(norm: float | None) -> None:
    """Raise `InputError` if replicas that train on their own are to clip the norm of all gradients."""
    advice = "each rank has gradients of its own here, and there is no one norm; leave it out, or average gradients"
    require(norm is None, f"--clip-norm {norm or 0:g}: {advice} (dp-ga)")


@dataclass
class HybridSettings(OuterSettings, ScheduleSettings):
    """A run of several equal pipelines, with `--batch-size` sequences each."""

    dp: int = 2
    """replicas of the pipeline"""
    pp: int = 3
    """stages of each pipeline"""
    tp: int = 1
    """ranks that share each stage; each has a slice of every layer"""
    neighbors: Annotated[Neighbors, ResumePolicy.SAME_LAYOUT] = "stages"
    """what ranks with neighboring numbers hold: the stages of a pipeline, or the replicas of a stage, so that pipelines
    and not their averages cross a slow link between hosts"""
    shard: Literal["none", "optimizer", "gradients", "weights"] = "none"
    """what the replicas shard, as in dp-zero; weights only with --pp 1; gradients saves memory only with schedules that
    do not delay weight gradients"""
    outer: Annotated[Literal["none", "diloco"], ResumePolicy.DEFAULT] = "none"
    """diloco: the pipelines train on their own, and an outer optimizer takes steps with what they have learned"""
    report_every: int = 1
    """print the loss every N steps; in the others, pipelines do not tell each other their losses"""

    @property
    def layout(self) -> Layout:
        sizes = {"dp": self.dp, "pp": self.pp, "tp": self.tp}
        return sizes if self.neighbors == "stages" else {kind: sizes[kind] for kind in ("pp", "dp", "tp")}

    @property
    def per_rank_optimizer_state(self) -> bool:
        return self.outer == "diloco" and self.optimizer != "sgd" and self.dp > 1

    def check(self) -> None:
        super().check()
        self._check_outer()
        check_division(self.num_heads, self.num_kv_heads, self.tp)
        given = f"--shard {self.shard}"
        single = f"{given} with --dp 1: a single replica has no others to share with; give --dp 2 or more"
        require(self.shard == "none" or self.dp > 1, single)
        gathers = f"{given} with --pp {self.pp}: each stage would be gathered again for every micro-batch"
        require(self.shard != "weights" or self.pp == 1, f"{gathers}; use --shard optimizer, or --pp 1 with --tp")

    def _check_outer(self) -> None:
        require_positive(self, "report_every")
        late = f"--report-every {self.report_every} with --run-on: a step that ran on is checked when its loss arrives"
        require(self.report_every == 1 or not self.run_on, f"{late}; leave one of them out")
        if self.outer == "none":
            changed = [field.name for field in fields(OuterSettings) if getattr(self, field.name) != field.default]
            if changed and self.resume is None:  # a checkpoint of another script may have these settings
                given = f"{as_flag(changed[0])} {getattr(self, changed[0])}"
                raise InputError(f"{given}: pipelines that average gradients have no outer steps; add --outer diloco")
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

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        super().check_checkpoint(checkpoint)
        saved = checkpoint.record["settings"]
        if self.outer == saved.get("outer") == "diloco" and self.layout == checkpoint.layout:
            saved = {"neighbors": "stages"} | saved  # older checkpoints do not have it
            # Or a rank would hold other layers.
            for name in ("schedule", "chunks_per_stage", "layers_per_stage", "neighbors"):
                resume.require_same(
                    f"--resume {self.resume}: it was trained with", name, saved[name], getattr(self, name)
                )

    def remarks(self, decided: dict[str, Any]) -> list[str]:
        outer = self.remarks_on_exchanges(self.steps, self.optimizer) if self.outer != "none" else []
        return [*super().remarks(decided), *outer]
