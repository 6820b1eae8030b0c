"""The settings of runs whose ranks share the layers of the Llama: pipelines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from distlab.pipeline.actions import Action, ActionCosts, Backward, Forward, stages_of
from distlab.pipeline.auto import Limit, read_limit
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import (
    AUTO,
    DEFAULT_CHUNKS,
    all_stages,
    check_schedule,
    is_file,
    read_schedule,
    schedule_names,
    stages_per_worker,
)
from distlab.pipeline.split import PartCosts, Split, balance, estimated_costs, multiply_adds, read_split
from distlab.settings.common import WorldSize, require_positive, shown_as
from distlab.settings.resume_policy import ResumePolicy
from distlab.settings.training import TrainSettings
from simplellm.errors import require
from simplellm.options import BLOCK_BY_BLOCK
from simplellm.tokenizers import SPTokenizer


@dataclass
class StageSettings(TrainSettings):
    """A training run whose model is divided into stages, each with some of the layers."""

    layers_per_stage: Annotated[str | None, ResumePolicy.SAME_LAYOUT, shown_as("N,N,...", "default: balanced")] = None
    """layers of each stage, e.g. 3,2,1"""
    run_on: bool = False
    """ranks do not wait for each other at the end of a step; its loss is printed a step later"""

    masks_documents: ClassVar[bool] = False
    """whether stages are told which tokens they see"""
    casts_messages: ClassVar[bool] = True
    """whether stages exchange activations in --dtype, and not always in float32"""

    def check(self) -> None:
        super().check()
        sentence = "only the first of this script's stages sees the tokens; use 5d, or a script without stages"
        require(self.masks_documents or not self.document_mask, f"--document-mask: {sentence}")
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
        """Return the layers of each stage: by `--layers-per-stage`, or balanced."""
        stages = self.stages
        if self.layers_per_stage is not None:
            return read_split(self.layers_per_stage, self.n_layers, stages)
        return balance(self.n_layers, stages, self._parts(vocab_size))

    def pass_costs(self, vocab_size: int) -> ActionCosts:
        """Return estimates of the costs of each stage's passes, from `estimated_costs`."""
        split, again, tp = self.split(vocab_size), self.recompute in BLOCK_BY_BLOCK, self.layout.get("tp", 1)
        tokens = self.batch_size // self.micro_batches * self.positions
        return estimated_costs(split, self._parts(vocab_size), again, tokens, tp)

    @property
    def hidden_per_token(self) -> int | None:
        """Width of the feed-forward layers that a token passes through; None for the default width of one."""
        return self.hidden_dim

    def _parts(self, vocab_size: int) -> PartCosts:
        return multiply_adds(
            vocab_size=vocab_size,
            dmodel=self.dmodel,
            seq_len=self.seq_len,
            hidden_dim=self.hidden_per_token,
            kv_width=self.dmodel // self.num_heads * (self.num_kv_heads or self.num_heads),
        )


@dataclass
class StagePerRank(WorldSize):
    """The layout of a single pipeline, in which every rank is a stage."""

    axis = "pp"

    world_size: int = 3
    """ranks, each a stage of the model"""


@dataclass
class PipelineSettings(StagePerRank, StageSettings):
    """A run of one pipeline in which each batch completes its forward and backward pass before the next one starts."""

    one_stage_at_a_time = True
    casts_messages = False


@dataclass
class WrittenScheduleSettings(StageSettings):
    """A run whose stages follow a written pipeline schedule."""

    schedule: Annotated[str, ResumePolicy.SAME_LAYOUT, tyro.conf.arg(metavar="|".join(schedule_names()))] = "dapple"
    """order of the forward and backward passes"""
    micro_batches: int = 3
    """parts that the batch is split into"""

    def check(self) -> None:
        read_schedule(self.schedule)
        super().check()
        check_schedule(self.schedule, self.layout["pp"], self.micro_batches, self.chunks, self.limit)
        if self.schedule != AUTO:
            simulate(self.programs())  # raises `InputError` for a schedule that cannot run

    @property
    def files(self) -> dict[str, Path]:
        own = {f"--schedule {self.schedule}": Path(self.schedule)} if is_file(self.schedule) else {}
        return super().files | own

    def programs(self) -> list[list[Action]]:
        """Return each worker's actions, in order."""
        sizes = self.layout["pp"], self.micro_batches, self.chunks
        return all_stages(self.schedule, *sizes, recompute=self.recompute == "all")

    @property
    def chunks(self) -> int:
        """Number of stages that each worker holds, if the schedule leaves it open."""
        return DEFAULT_CHUNKS

    @property
    def limit(self) -> Limit | None:
        """Limit of the activations that a worker keeps, for a search."""
        return None

    @property
    def stages(self) -> int:
        return self.layout["pp"] * stages_per_worker(self.schedule, self.chunks)

    @property
    def held(self) -> list[list[int]]:
        return [stages_of(program) for program in self.programs()]

    @property
    def owners(self) -> list[int]:
        """The worker that holds each stage."""
        workers = {stage: worker for worker, own in enumerate(self.held) for stage in own}
        return [workers[stage] for stage in sorted(workers)]


@dataclass
class ScheduleSettings(WrittenScheduleSettings):
    """A run whose stages follow any pipeline schedule, including one found by a search."""

    chunks_per_stage: Annotated[int, ResumePolicy.SAME_LAYOUT] = DEFAULT_CHUNKS
    """with --schedule interleaved or auto: stages that each rank holds; auto: 1 or 2"""
    keep_at_most: Annotated[
        str | None, ResumePolicy.SAME_LAYOUT, shown_as("N|SIZE", "default: as many micro-batches as workers")
    ] = None
    """with --schedule auto: the most activations that a rank keeps, in micro-batches (6) or bytes (200MB)"""

    def check(self) -> None:
        require_positive(self, "chunks_per_stage")
        super().check()

    @property
    def chunks(self) -> int:
        return self.chunks_per_stage

    @property
    def limit(self) -> Limit | None:
        return None if self.keep_at_most is None else read_limit(self.keep_at_most)


@dataclass
class PlainPipelineSettings(StagePerRank, WrittenScheduleSettings):
    """A run of one pipeline that follows a schedule of whole forward and backward passes."""

    casts_messages = False

    def check(self) -> None:
        super().check()
        kinds = {type(action) for program in self.programs() for action in program}
        recomputed = " with --recompute all" if self.recompute == "all" else ""
        sentence = "this script runs whole forward and backward passes (F and B) of one stage per rank"
        is_plain = kinds <= {Forward, Backward} and self.stages == self.world_size
        require(is_plain, f"--schedule {self.schedule}{recomputed}: {sentence}; give naive, gpipe or dapple")
        for flag, is_given in (("--trace", self.trace), ("--run-on", self.run_on)):
            require(not is_given, f"{flag}: only a script with the executor in distlab.pipeline.executor has it")


@dataclass
class ScheduledPipelineSettings(StagePerRank, ScheduleSettings):
    """A run of one pipeline that follows a schedule."""
