"""What a run is asked to do: the flags that the scripts share, read and checked before any process waits."""

import math
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from distlab.checkpoints.format import LLAMA, has_checkpoints, latest_valid
from distlab.comm.grid import Layout, layout_flags, layout_size
from distlab.parallel.tensor import check_division
from distlab.pipeline.schedules import SCHEDULES
from distlab.pipeline.stages import Split, balance, read_split
from distlab.run import command_line, resume
from simplellm.errors import InputError
from simplellm.llama import check_heads
from simplellm.sources import open_source
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

# Beyond these a wish is a slip of the finger, which would keep a computer busy until it is out of memory.
MOST_RANKS, MOST_LAYERS, MOST_TOKENS = 1024, 1000, 2**24


@dataclass
class RunSettings:
    """What every script needs, whatever it computes: who takes part, on which device, how to meet."""

    rank: Annotated[
        int, tyro.conf.Positional, tyro.conf.arg(metavar="RANK", help_behavior_hint="(needed without torchrun)")
    ] = -1
    """rank of this process, from 0; torchrun and launch.sh give it themselves"""
    seed: int = 0
    """seed of the initial weights and of the data"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute; auto: CUDA if present"""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """how ranks talk; auto: NCCL when every rank has a GPU of its own, else gloo"""
    timeout: float = 120
    """seconds that any wait for another rank may take"""
    master_addr: str = "localhost"
    """host where rank 0 listens"""
    master_port: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 29500; with launch.sh, a free one)")
    ] = None
    """port where rank 0 listens"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/<script>/<time>)")] = (
        None
    )
    """folder for the run's files"""

    @property
    def layout(self) -> Layout:
        """Ranks along each kind of parallelism, e.g. ``{"dp": 3}``; their product is the world size."""
        return {}

    def check(self) -> None:
        """Raise `InputError` for a value that cannot work, before any process waits for another."""
        if not 0 < self.timeout <= 1e6:
            raise InputError(f"--timeout {self.timeout}: give seconds, more than 0 and at most a million")
        kinds = get_type_hints(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            choices = get_args(kinds[field.name]) if get_origin(kinds[field.name]) is Literal else (value,)
            if value not in choices:  # out of a checkpoint, whose values become defaults
                raise InputError(f"{as_flag(field.name)} {value}: there are {', '.join(choices)}")
            for number in value if isinstance(value, list) else [value]:
                if field.name != "seed" and isinstance(number, int) and abs(number) >= 2**31:
                    raise InputError(f"{as_flag(field.name)} {number}: give a number of at most 31 bits")
        for size in self.layout.values():
            if size < 1:
                raise InputError(f"{layout_flags(self.layout)}: every size must be at least 1")
        if layout_size(self.layout) > MOST_RANKS:
            raise InputError(
                f"{layout_flags(self.layout)}: these are {layout_size(self.layout):,} ranks; give at most "
                f"{MOST_RANKS:,}"
            )
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise InputError(f"--master-port {self.master_port}: a port is a number from 1 to 65535")
        if self.device == "cpu" and self.backend == "nccl":
            raise InputError("--backend nccl with --device cpu: NCCL moves CUDA tensors only; use --backend gloo")
        if not -(2**63) <= self.seed < 2**63:
            raise InputError(f"--seed {self.seed}: give a number of at most 63 bits")
        if self.out is not None:
            try:
                there = next(path for path in (self.out, *self.out.absolute().parents) if path.exists())
            except OSError as error:
                raise InputError(f"--out {self.out}: {error.strerror}; give another folder") from None
            if not there.is_dir() or not os.access(there, os.W_OK):
                raise InputError(f"--out {self.out}: {there} is no folder that can be written to; give another one")


@dataclass
class ResumableSettings(RunSettings):
    """A training run that keeps checkpoints, and goes on from one."""

    resume_policy: ClassVar[resume.ResumePolicy[Any]]
    """which settings are those of the checkpoint that it goes on from"""

    save_every: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: never)")] = None
    """steps between two checkpoints; the last step is saved too"""
    keep: int = 3
    """checkpoints to keep, the last ones"""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: begin)")] = None
    """a run, or one of its checkpoints, to go on from: model, data and optimizer are its own by default"""

    @property
    def length(self) -> tuple[str, int]:
        """The flag that says how long the run is, as the user wrote it, and how many steps that makes."""
        raise NotImplementedError

    @property
    def tokenizer_model(self) -> Path | None:
        """The SentencePiece model; None where the data is no text."""
        return None

    @property
    def data_identity(self) -> dict[str, Any] | None:
        """What tells the data from others, if it is known before the run begins and if other settings do not."""
        return None

    @property
    def per_rank_optimizer_state(self) -> bool:
        """True if the optimizer's state is not the same on all replicas."""
        return False

    def check(self) -> None:
        super().check()
        require_positive(self, "keep")
        if self.save_every is not None:
            require_positive(self, "save_every")

    def check_checkpoints(self) -> None:
        """Raise `InputError` if the run cannot go on from `--resume`, or `--out` has the checkpoints of another run.

        All other settings have been checked.
        """
        if self.resume is not None:
            self.resume_policy.check(latest_valid(self.resume, at_a_glance=True), self)
        if self.save_every and self.out is not None and has_checkpoints(self.out):
            begun_in = None if self.resume is None else latest_valid(self.resume, at_a_glance=True).folder.resolve()
            if begun_in is None or self.out.resolve() not in begun_in.parents:
                raise InputError(
                    f"--out {self.out}: has checkpoints of another run; give another folder, or --resume {self.out}"
                )


@dataclass
class TrainSettings(ResumableSettings):
    """A training run of the lab's Llama."""

    resume_policy = resume.LlamaResumePolicy(
        LLAMA,
        sizes=("dmodel", "num_heads", "n_layers"),
        fixed=("optimizer",),
        defaults=("seq_len", "seed", "lr", "dtype"),
        layout_defaults=("batch_size", "micro_batches", "schedule", "layers_per_stage", "sync_every"),
    )

    steps: int = 5000
    """optimizer steps"""
    batch_size: int = 3
    """sequences per step for one model replica"""
    micro_batches: int = 1
    """parts that the batch is split into"""
    seq_len: int = 256
    """tokens per sequence"""
    dmodel: int = 288
    """width of the model"""
    num_heads: int = 6
    """attention heads"""
    num_kv_heads: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: as many as --num-heads)")
    ] = None
    """heads of keys and values, each of which serves as many attention heads as the others (grouped-query attention)"""
    n_layers: int = 6
    """transformer layers"""
    lr: float = 8e-4
    """learning rate"""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """update rule"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 computes in mixed precision"""
    data: Annotated[str, tyro.conf.arg(metavar="auto|sample|tinystories|FILE")] = "auto"
    """stories: the generator (sample), the hub's data set (tinystories), or a .txt, .jsonl or .parquet file"""
    tokenizer: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the shipped one)")
    ] = None
    """a SentencePiece model"""
    eval_every: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: never)")] = None
    """steps between two looks at the loss of stories that are not trained on"""
    eval_sequences: int = 24
    """sequences of such stories"""
    trace: bool = False
    """record and draw the timeline, when the run ends by itself"""
    tensorboard: bool = False
    """keep the records for TensorBoard too, in the run's folder"""

    @property
    def length(self) -> tuple[str, int]:
        return f"--steps {self.steps}", self.steps

    @property
    def tokenizer_model(self) -> Path:
        return self.tokenizer or SHIPPED_MODEL

    @property
    def data_identity(self) -> dict[str, Any] | None:
        return None if self.data == "auto" else resume.data_identity(self.data, self.seed)

    def check(self) -> None:
        super().check()
        require_positive(self, "steps", "batch_size", "micro_batches", "dmodel", "num_heads", "n_layers", "lr")
        require_positive(self, "eval_sequences")
        if self.eval_every is not None:
            require_positive(self, "eval_every")
        if self.n_layers > MOST_LAYERS:
            raise InputError(f"--n-layers {self.n_layers}: give at most {MOST_LAYERS:,}")
        for flag, sequences in (("--batch-size", self.batch_size), ("--eval-sequences", self.eval_sequences)):
            if sequences * self.seq_len > MOST_TOKENS:
                tokens = f"{sequences * self.seq_len:,} tokens at a time"
                raise InputError(
                    f"{flag} {sequences} with --seq-len {self.seq_len}: {tokens}; give at most {MOST_TOKENS:,}"
                )
        if self.seq_len < 2:
            raise InputError(f"--seq-len {self.seq_len}: predicting the next token needs at least 2")
        if self.num_kv_heads is not None:
            require_positive(self, "num_kv_heads")
        check_heads(self.dmodel, self.num_heads, self.num_kv_heads)
        if self.batch_size % self.micro_batches:
            raise InputError(
                f"--batch-size {self.batch_size} with --micro-batches {self.micro_batches}: the batch must divide into "
                f"equal micro-batches; give a multiple of {self.micro_batches}"
            )
        SPTokenizer(self.tokenizer)
        if self.data not in ("auto", "tinystories"):
            for split in ("train", "validation") if self.eval_every else ("train",):
                next(open_source(self.data, split, self.seed).documents(0))


@dataclass
class WorldSize:
    """A topology of one kind, mixed into a script's settings; by default every rank is a replica."""

    world_size: int = 3
    """ranks, each with the whole model"""

    @property
    def layout(self) -> Layout:
        return {"dp": self.world_size}


@dataclass
class DataParallelSettings(WorldSize, TrainSettings):
    """A data-parallel training run: `--batch-size` sequences per rank."""

    batch_size: int = 1


@dataclass
class StageSettings(TrainSettings):
    """A training run in which the model is cut into stages, each with some of the layers."""

    layers_per_stage: Annotated[
        str | None, tyro.conf.arg(metavar="N,N,...", help_behavior_hint="(default: balanced)")
    ] = None
    """layers of each stage, e.g. 3,2,1"""

    def check(self) -> None:
        super().check()
        self.split(SPTokenizer(self.tokenizer).vocab_size)

    def split(self, vocab_size: int) -> Split:
        """The layers of each stage: as `--layers-per-stage` gives them, else balanced."""
        stages = self.layout["pp"]
        if self.layers_per_stage is not None:
            return read_split(self.layers_per_stage, self.n_layers, stages)
        sizes = {"vocab_size": vocab_size, "dmodel": self.dmodel, "seq_len": self.seq_len}
        kv_heads = self.num_kv_heads or self.num_heads
        return balance(self.n_layers, stages, **sizes, kv_width=self.dmodel // self.num_heads * kv_heads)


@dataclass
class StagePerRank(WorldSize):
    """The topology of one pipeline: every rank is a stage."""

    world_size: int = 3
    """ranks, each a stage of the model"""

    @property
    def layout(self) -> Layout:
        return {"pp": self.world_size}


@dataclass
class PipelineSettings(StagePerRank, StageSettings):
    """A run of one pipeline whose order of passes is the script's own."""


@dataclass
class ScheduleSettings(StageSettings):
    """A run of stages that follow a schedule."""

    schedule: Annotated[str, tyro.conf.arg(metavar="|".join(SCHEDULES))] = "dapple"
    """order of the forward and backward passes"""
    micro_batches: int = 3
    """parts that the batch is split into"""

    def check(self) -> None:
        super().check()
        if self.schedule not in SCHEDULES:
            raise InputError(f"--schedule {self.schedule}: there are {', '.join(SCHEDULES)}")


@dataclass
class ScheduledPipelineSettings(StagePerRank, ScheduleSettings):
    """A run of one pipeline that follows a schedule."""


@dataclass
class HybridSettings(ScheduleSettings):
    """A run of several equal pipelines: `--batch-size` sequences for each."""

    dp: int = 2
    """replicas of the pipeline"""
    pp: int = 3
    """stages of each pipeline"""
    tp: int = 1
    """ranks that share each stage; each has a slice of every layer"""

    @property
    def layout(self) -> Layout:
        return {"dp": self.dp, "pp": self.pp, "tp": self.tp}

    def check(self) -> None:
        super().check()
        check_division(self.num_heads, self.num_kv_heads, self.tp)


def require_positive(settings: Any, *names: str) -> None:
    """Raise `InputError` unless each named field is greater than zero."""
    for name in names:
        value = getattr(settings, name)
        if not 0 < value < math.inf:
            raise InputError(f"{as_flag(name)} {value}: must be greater than 0")


def as_flag(name: str) -> str:
    """The flag of a setting."""
    return f"--{name.replace('_', '-')}"


SettingsT = TypeVar("SettingsT", bound=RunSettings)


def parse(defaults: SettingsT, description: str, args: list[str] | None = None, prog: str | None = None) -> SettingsT:
    """Read the command line over a script's defaults and check it.

    Raises:
        InputError: with one sentence, for a flag or value that cannot work.
    """

    def read(defaults: SettingsT) -> SettingsT:
        return command_line.read(
            lambda: tyro.cli(type(defaults), default=defaults, args=args, prog=prog, description=description)
        )

    settings = read(defaults)
    if isinstance(settings, ResumableSettings) and settings.resume is not None:  # once more, with other defaults
        checkpoint = latest_valid(settings.resume, at_a_glance=True)
        settings = read(replace(settings, **settings.resume_policy.values(checkpoint, settings)))
    settings.check()
    if isinstance(settings, ResumableSettings):
        settings.check_checkpoints()
    return settings


def as_json(settings: RunSettings) -> dict[str, Any]:
    """All settings but the rank, as plain values: what `config.json` keeps and what ranks compare."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    del values["rank"]
    return values
