"""What a run is asked to do: the flags that the scripts share, read and checked before any process waits."""

import math
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from distlab.checkpoints.format import LLAMA, Checkpoint, has_checkpoints, latest_valid
from distlab.collectives import ALL_REDUCES
from distlab.comm.grid import Layout, layout_flags, layout_size
from distlab.comm.traffic import AllReduce
from distlab.parallel.tensor import check_division
from distlab.pipeline.schedules import schedule_names
from distlab.pipeline.stages import Split, balance, read_split
from distlab.run import resume
from distlab.run.resume import ResumePolicy
from simplellm import command_line
from simplellm.errors import InputError, require
from simplellm.llama import check_heads
from simplellm.sources import choose_source, open_source
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

    one_stage_at_a_time: ClassVar[bool] = False
    """whether the stages of a pipeline compute in turn, so that each can have the cores of all"""

    @property
    def layout(self) -> Layout:
        """Ranks along each kind of parallelism, e.g. ``{"dp": 3}``; their product is the world size."""
        return {}

    def decide(self) -> dict[str, Any]:
        """What rank 0 decides for all, besides the run's folder; it goes to `config.json`."""
        return {}

    def remarks(self, decided: dict[str, Any]) -> list[str]:
        """What to say of these decisions when the run begins."""
        return []

    def check(self) -> None:
        """Raise `InputError` for a value that cannot work, before any process waits for another."""
        require(0 < self.timeout <= 1e6, f"--timeout {self.timeout}: give seconds, more than 0 and at most a million")
        kinds = get_type_hints(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            choices = get_args(kinds[field.name]) if get_origin(kinds[field.name]) is Literal else (value,)
            # Out of a checkpoint, whose values become defaults, it may be anything.
            require(value in choices, f"{as_flag(field.name)} {value}: there are {', '.join(map(str, choices))}")
            for number in value if isinstance(value, list) else [value]:
                bits = 63 if field.name == "seed" else 31
                fits = not isinstance(number, int) or -(2**bits) <= number < 2**bits
                require(fits, f"{as_flag(field.name)} {number}: give a number of at most {bits} bits")
        flags, ranks = layout_flags(self.layout), layout_size(self.layout)
        require(all(size > 0 for size in self.layout.values()), f"{flags}: every size must be at least 1")
        require(ranks <= MOST_RANKS, f"{flags}: these are {ranks:,} ranks; give at most {MOST_RANKS:,}")
        port = self.master_port
        require(port is None or 0 < port < 65536, f"--master-port {port}: a port is a number from 1 to 65535")
        nowhere = self.device == "cpu" and self.backend == "nccl"
        require(not nowhere, "--backend nccl with --device cpu: NCCL moves CUDA tensors only; use --backend gloo")
        if self.out is not None:
            try:
                there = next(path for path in (self.out, *self.out.absolute().parents) if path.exists())
            except OSError as error:
                raise InputError(f"--out {self.out}: {error.strerror}; give another folder") from None
            can_write = there.is_dir() and os.access(there, os.W_OK)
            require(can_write, f"--out {self.out}: {there} is no folder that can be written to; give another one")


@dataclass
class ResumableSettings(RunSettings):
    """A training run that keeps checkpoints, and resumes from one.

    A setting that a resumed run takes over from its checkpoint, or that must match it, has a `ResumePolicy`.
    """

    architecture: ClassVar[str]
    """what checkpoints call the model that the script trains"""

    save_every: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: never)")] = None
    """write a checkpoint every N steps, and after the last one"""
    keep: int = 3
    """checkpoints to keep, the last ones"""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: a new run)")] = None
    """run or checkpoint to resume; model, data and optimizer settings are taken from it"""

    @property
    def length(self) -> tuple[str, int]:
        """The flag that says how long the run is, as the user wrote it, and how many steps that makes."""
        raise NotImplementedError(f"{type(self).__name__} says how long its run is")

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
        require_positive(self, "keep", "save_every")

    def decide(self) -> dict[str, Any]:
        return {"data_identity": self.data_identity}

    def saved_values(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Settings, by name, for which the checkpoint's values take the place of the script's defaults.

        Raises:
            InputError: the checkpoint is that of another architecture, or has values of other types.
        """
        self._check_architecture(checkpoint)
        return resume.saved_values(checkpoint, self)

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raise `InputError` if a run with these settings would not be the one that the checkpoint was taken from."""
        self._check_architecture(checkpoint)
        flag, record = f"--resume {self.resume}", checkpoint.record
        for name in resume.marked(self, ResumePolicy.MODEL):
            resume.require_same(f"{flag}: its model has", name, record["model"].get(name), getattr(self, name))
        for name in resume.marked(self, ResumePolicy.FIXED):
            own = getattr(self, name)
            resume.require_same(f"{flag}: it was trained with", name, record["settings"].get(name, own), own)
        tokenizer = self.tokenizer_model
        is_same = tokenizer is None or resume.has_tokenizer(checkpoint, tokenizer)
        given = f"--tokenizer {tokenizer}; leave --tokenizer out"
        given = "the one that comes with the lab" if tokenizer == SHIPPED_MODEL else given
        require(is_same, f"{flag}: it was trained with another tokenizer than {given}")
        resume.check_data(checkpoint, self.data_identity)

    def _check_architecture(self, checkpoint: Checkpoint) -> None:
        own, its = self.architecture, checkpoint.architecture
        sentence = f"its model is of the architecture {its}, not {own}; give a run of the same model"
        require(own == its, f"--resume {self.resume}: {sentence}")

    def check_folders(self) -> None:
        """Raise `InputError` if the run cannot resume from `--resume`, or `--out` has checkpoints of another run.

        All other settings have been checked.
        """
        resumed = None if self.resume is None else latest_valid(self.resume, at_a_glance=True)
        if resumed is not None:
            self.check_checkpoint(resumed)
        out = self.out
        if self.save_every and out is not None and has_checkpoints(out):
            is_own = resumed is not None and resumed.is_of_run(out)
            require(is_own, f"--out {out}: has checkpoints of another run; give another folder, or --resume {out}")


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
    num_kv_heads: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: as many as --num-heads)")
    ] = None
    """heads of keys and values, each of which serves as many attention heads as the others (grouped-query attention)"""
    n_layers: Annotated[int, ResumePolicy.MODEL] = 6
    """transformer layers"""
    lr: Annotated[float, ResumePolicy.DEFAULT] = 8e-4
    """learning rate"""
    optimizer: Annotated[Literal["adam", "adamw", "sgd"], ResumePolicy.FIXED] = "adam"
    """update rule"""
    dtype: Annotated[Literal["float32", "bfloat16"], ResumePolicy.DEFAULT] = "float32"
    """bfloat16 computes in mixed precision"""
    data: Annotated[str, tyro.conf.arg(metavar="auto|sample|tinystories|FILE")] = "auto"
    """stories: the generator (sample), the hub's data set (tinystories), or a .txt, .jsonl or .parquet file"""
    tokenizer: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the shipped one)")
    ] = None
    """a SentencePiece model"""
    eval_every: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: never)")] = None
    """evaluate on the validation split every N steps"""
    eval_sequences: int = 24
    """sequences of the validation split to evaluate on"""
    trace: bool = False
    """record and draw the timeline, when the run ends by itself"""
    tensorboard: bool = False
    """write the records for TensorBoard too, in the run's folder"""

    @property
    def length(self) -> tuple[str, int]:
        return f"--steps {self.steps}", self.steps

    @property
    def tokenizer_model(self) -> Path:
        return self.tokenizer or SHIPPED_MODEL

    @property
    def data_identity(self) -> dict[str, Any] | None:
        return None if self.data == "auto" else self._identity_of(self.data)

    def _identity_of(self, data: str) -> dict[str, Any]:
        if data == "sample":
            return {"source": data, "seed": self.seed}
        return {"source": data} if data == "tinystories" else resume.file_identity(data)

    def decide(self) -> dict[str, Any]:
        source, why = choose_source(self.data)
        return {"data": source, "data_because": why, "data_identity": self._identity_of(source)}

    def remarks(self, decided: dict[str, Any]) -> list[str]:
        return [f"stories from {decided['data_because']}"]

    def saved_values(self, checkpoint: Checkpoint) -> dict[str, Any]:
        values, model = super().saved_values(checkpoint), checkpoint.record["model"]
        values.setdefault("seq_len", min(self.seq_len, model["ctx_size"]))  # no settings come with an imported model
        values["num_kv_heads"] = None if model["num_kv_heads"] == model["num_heads"] else model["num_kv_heads"]
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
        require(has == reads, f"{flag}: its model has {has} tokens, and its tokenizer {reads}")
        same_ranks = self.per_rank_optimizer_state and self.layout == checkpoint.layout
        require(
            same_ranks or not checkpoint.per_rank_optimizer_state,
            f"{flag}: each of its {layout_size(checkpoint.layout)} ranks kept {self.optimizer}'s moments of its own "
            "gradients, which mean nothing to another layout; resume with the same script and "
            f"{layout_flags(checkpoint.layout)}",
        )

    def check(self) -> None:
        super().check()
        sizes = "steps batch_size micro_batches dmodel num_heads num_kv_heads n_layers lr eval_every eval_sequences"
        require_positive(self, *sizes.split())
        require(self.n_layers <= MOST_LAYERS, f"--n-layers {self.n_layers}: give at most {MOST_LAYERS:,}")
        for flag, sequences in (("--batch-size", self.batch_size), ("--eval-sequences", self.eval_sequences)):
            tokens, given = sequences * self.seq_len, f"{flag} {sequences} with --seq-len {self.seq_len}"
            require(tokens <= MOST_TOKENS, f"{given}: {tokens:,} tokens at a time; give at most {MOST_TOKENS:,}")
        require(self.seq_len > 1, f"--seq-len {self.seq_len}: predicting the next token needs at least 2")
        check_heads(self.dmodel, self.num_heads, self.num_kv_heads)
        require(
            self.batch_size % self.micro_batches == 0,
            f"--batch-size {self.batch_size} with --micro-batches {self.micro_batches}: the batch must divide into "
            f"equal micro-batches; give a multiple of {self.micro_batches}",
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
class ByHandSettings(DataParallelSettings):
    """A data-parallel training run whose averages may be made by a collective of the lab's own."""

    all_reduce: Literal["library", "naive", "tree", "butterfly", "ring"] = "library"
    """who averages the gradients: the library, or our own collective of this topology, over gloo"""

    @property
    def by_hand(self) -> AllReduce | None:
        return ALL_REDUCES.get(self.all_reduce)

    def check(self) -> None:
        super().check()
        if self.by_hand is not None:
            sentence = f"--all-reduce {self.all_reduce} with --backend nccl: our own work over gloo only"
            require(self.backend != "nccl", sentence)
            self.backend = "gloo"


@dataclass
class StageSettings(TrainSettings):
    """A training run in which the model is cut into stages, each with some of the layers."""

    layers_per_stage: Annotated[
        str | None,
        ResumePolicy.SAME_LAYOUT,
        tyro.conf.arg(metavar="N,N,...", help_behavior_hint="(default: balanced)"),
    ] = None
    """layers of each stage, e.g. 3,2,1"""

    def check(self) -> None:
        super().check()
        self.split(SPTokenizer(self.tokenizer).vocab_size)

    def decide(self) -> dict[str, Any]:
        return {**super().decide(), "layers_per_stage": self.split(SPTokenizer(self.tokenizer).vocab_size)}

    def remarks(self, decided: dict[str, Any]) -> list[str]:
        layers = ", ".join(map(str, decided["layers_per_stage"]))
        return [*super().remarks(decided), f"layers of each stage: {layers}"]

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
    """A run of one pipeline in which a batch goes all the way forward and back before the next one."""

    one_stage_at_a_time = True


@dataclass
class ScheduleSettings(StageSettings):
    """A run of stages that follow a schedule."""

    schedule: Annotated[str, ResumePolicy.SAME_LAYOUT, tyro.conf.arg(metavar="|".join(schedule_names()))] = "dapple"
    """order of the forward and backward passes"""
    micro_batches: int = 3
    """parts that the batch is split into"""

    def check(self) -> None:
        super().check()
        names = schedule_names()
        require(self.schedule in names, f"--schedule {self.schedule}: there are {', '.join(names)}")


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
    """Raise `InputError` unless each named field is greater than zero, or None."""
    for name in names:
        value = getattr(settings, name)
        require(value is None or 0 < value < math.inf, f"{as_flag(name)} {value}: must be greater than 0")


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
        settings = read(replace(settings, **settings.saved_values(checkpoint)))
    settings.check()
    if isinstance(settings, ResumableSettings):
        settings.check_folders()
    return settings


def as_json(settings: RunSettings) -> dict[str, Any]:
    """All settings but the rank, as plain values: what `config.json` keeps and what ranks compare."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    del values["rank"]
    return values
