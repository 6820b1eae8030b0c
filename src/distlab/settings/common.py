"""The flags that all scripts share, read and checked before any process waits for another."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from distlab.axes.layout import Layout, layout_flags, layout_size
from distlab.machine.cores import asked_threads
from distlab.machine.processes import started_by_torchrun
from distlab.settings.folders import check_out, has_folders
from simplellm import command_line
from simplellm.errors import FlagError, InputError, as_flag, require, require_text

if TYPE_CHECKING:
    from distlab.checkpoints.format import Checkpoint
    from distlab.comm.recorder import StepTime

MOST_RANKS = 1024  # a larger number is taken for a typing error; it would use up all memory


def shown_as(metavar: str, hint: str) -> Any:
    """Set how `--help` shows a flag: the kind of its value, and a hint about its default."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"({hint})")


@dataclass
class RunSettings:
    """The settings of every script, whatever it computes: its ranks, their devices, and where they meet."""

    rank: Annotated[int, tyro.conf.Positional, shown_as("RANK", "needed without torchrun")] = -1
    """rank of this process, from 0; torchrun and launch.sh set it themselves"""
    seed: int = 0
    """seed of the initial weights and of the data"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute; auto: CUDA if present"""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """how ranks communicate; auto: NCCL if every rank has a GPU of its own, else gloo"""
    transport: Literal["auto", "shared", "gloo"] = "auto"
    """how tensors travel between ranks on the CPU; auto: in shared memory within a host if that is faster, else gloo"""
    timeout: float = 120
    """seconds that any wait for another rank may take"""
    master_addr: str = "localhost"
    """host where rank 0 listens"""
    master_port: Annotated[int | None, shown_as("INT", "default: 29500; with launch.sh, a free one")] = None
    """port where rank 0 listens"""
    out: Annotated[Path | None, shown_as("DIR", "default: runs/<script>/<time>")] = None
    """folder for the run's files"""

    one_stage_at_a_time: ClassVar[bool] = False
    """whether the stages of a pipeline compute one after another, so that each can use the cores of all"""

    @property
    def layout(self) -> Layout:
        """The ranks along each kind of parallelism, e.g. ``{"dp": 3}``; their product is the world size."""
        return {}

    @property
    def can_repair(self) -> bool:
        """True if the run goes on when a rank dies."""
        return False

    @property
    def held(self) -> Sequence[Sequence[int]]:
        """The stages of each pipeline worker; empty if each worker holds one."""
        return ()

    def decide(self) -> dict[str, Any]:
        """Return rank 0's decisions for all ranks, apart from the run's folder; they are written to `config.json`."""
        return {}

    def remarks(self, decided: dict[str, Any]) -> list[str]:
        """Return lines about these decisions, to print when the run starts."""
        return []

    def remarks_at_the_end(self, times: "Sequence[StepTime]") -> list[str]:
        """Return lines about the run's steps, to print at its end; `times` are the times of rank 0."""
        return []

    def check(self) -> None:
        """Raise `InputError` for a value that cannot work, before any process waits for another."""
        require(0 < self.timeout <= 1e6, f"--timeout {self.timeout}: give seconds, more than 0 and at most a million")
        asked_threads()  # raises `InputError` for a number that no machine can have
        kinds = get_type_hints(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            choices = get_args(kinds[field.name]) if get_origin(kinds[field.name]) is Literal else (value,)
            # A checkpoint's values become defaults, so the value may be anything.
            require(value in choices, f"{as_flag(field.name)} {value}: give one of {', '.join(map(str, choices))}")
            require_text(str(value), field.name)
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
        needs_cpu = self.transport == "shared" and (self.device == "cuda" or self.backend == "nccl")
        require(not needs_cpu, "--transport shared: only ranks on the CPU share memory; use --device cpu")
        if self.out is not None:
            try:
                there = next(path for path in (self.out, *self.out.absolute().parents) if path.exists())
            except OSError as error:
                raise InputError(f"--out {self.out}: {error.strerror}; give another folder") from None
            can_write = there.is_dir() and os.access(there, os.W_OK)
            require(can_write, f"--out {self.out}: {there} is not a writable folder; give another one")
            check_out(self.out)


@dataclass
class ResumableSettings(RunSettings):
    """A training run that saves checkpoints and can resume, each setting by its `ResumePolicy`."""

    architecture: ClassVar[str]
    """name in checkpoints for the model that the script trains"""

    lacks: ClassVar[Mapping[str, object]] = {}
    """settings that only a fuller script has, with the values that correspond to this script"""

    save_every: Annotated[int | None, shown_as("INT", "default: never")] = None
    """write a checkpoint every N steps, and after the last one"""
    keep: int = 3
    """how many of the last checkpoints to keep"""
    resume: Annotated[Path | None, shown_as("DIR", "default: a new run")] = None
    """run or checkpoint to resume; model, data and optimizer settings are taken from it"""
    record_gradients: Annotated[int | None, shown_as("INT", "default: none")] = None
    """record the first N steps for `compare`: 8 bytes for each parameter of a rank and step, at most 4 GiB a rank"""

    @property
    def has_checkpoints(self) -> bool:
        """True if the run reads or writes checkpoints."""
        return self.save_every is not None or self.resume is not None

    @property
    def length(self) -> tuple[str, int]:
        """The flag that sets the length of the run, as the user wrote it, and the number of steps that it gives."""
        raise NotImplementedError(f"{type(self).__name__} must define the length of its run")

    def every_few_steps(self, steps: int) -> int:
        """Return a value of `--save-every` to suggest for `steps` steps."""
        return max(1, steps // 5)

    @property
    def tokenizer_model(self) -> Path | None:
        """The SentencePiece model; None if the data is not text."""
        return None

    @property
    def data_identity(self) -> dict[str, Any] | None:
        """Return a record that identifies the data; None if unknown before the run, or given by other settings."""
        return None

    @property
    def files(self) -> dict[str, Path]:
        """Return the files and folders on which the training depends, by the names of their settings."""
        found = {} if self.tokenizer_model is None else {"--tokenizer": self.tokenizer_model}
        data = self.data_identity or {}
        return found | ({f"--data {self.data}": Path(data["source"])} if "bytes" in data else {})  # type: ignore[attr-defined]

    @property
    def per_rank_optimizer_state(self) -> bool:
        """True if the optimizer's state differs between replicas."""
        return False

    def check(self) -> None:
        super().check()
        require_positive(self, "keep", "save_every", "record_gradients")
        where = os.path.abspath(self.out or "runs")
        shown = where.encode(errors="backslashreplace").decode()
        is_text = self.save_every is None or shown == where
        require(is_text, f"--out {shown}: checkpoints need a path in UTF-8; give a folder that has one")

    def decide(self) -> dict[str, Any]:
        return {"data_identity": self.data_identity}

    def check_checkpoint(self, checkpoint: "Checkpoint") -> None:
        """Raise `InputError` if a run with these settings would not continue the run that wrote the checkpoint."""
        from distlab.settings.resuming import check_checkpoint

        check_checkpoint(self, checkpoint)

    def check_folders(self) -> None:
        """Raise `InputError` if the run cannot resume from `--resume`, or `--out` has checkpoints of another run."""
        if self.resume is None and (self.out is None or not has_folders(self.out)):
            return
        from distlab.settings.resuming import check_folders

        check_folders(self)


@dataclass
class WorldSize:
    """The settings of a layout with one axis of parallelism; by default every rank is a replica."""

    axis: ClassVar[str] = "dp"

    world_size: int = 3
    """ranks, each with the whole model"""

    @property
    def layout(self) -> Layout:
        return {self.axis: self.world_size}


def require_positive(settings: Any, *names: str) -> None:
    """Raise `InputError` unless each named field is finite and greater than zero, or None."""
    for name in names:
        value = getattr(settings, name)
        require(value is None or value > 0, f"{as_flag(name)} {value}: must be greater than 0")
        require(value is None or value < math.inf, f"{as_flag(name)} {value}: must be finite")


SettingsT = TypeVar("SettingsT", bound=RunSettings)


def parse(
    defaults: SettingsT,
    description: str,
    args: list[str] | None = None,
    prog: str | None = None,
    more: Path | None = None,  # a script that runs instead if it has the flags; --help lists those too
) -> SettingsT:
    """Read the command line, with a script's defaults, and check it; `InputError` for values that cannot work."""

    def read(defaults: SettingsT) -> SettingsT:
        return command_line.read(
            lambda: tyro.cli(type(defaults), default=defaults, args=args, prog=prog, description=description)
        )

    args = sys.argv[1:] if args is None else args
    if started_by_torchrun() and isinstance(defaults, WorldSize):
        defaults = replace(defaults, world_size=int(os.environ["WORLD_SIZE"]))
    has_repair = any(arg.partition("=")[0] == "--repair" for arg in args)
    args = complete_repair(args, defaults)
    check_values(args)
    if not {"-h", "--help"}.isdisjoint(args):
        from distlab.settings.help import show_help

        show_help(defaults, description, args, prog, more)
    try:
        settings = read(defaults)
    except FlagError as error:
        hint = "; --repair goes with the flags of dp-ga or hybrid" * has_repair
        raise FlagError(f"{error}{hint}") from None
    try:
        if isinstance(settings, ResumableSettings) and settings.resume is not None:  # again: its values are defaults
            from distlab.checkpoints.format import latest_valid
            from distlab.settings.resuming import saved_values

            checkpoint = latest_valid(settings.resume, at_a_glance=True)
            settings = read(replace(settings, **saved_values(settings, checkpoint)))
        settings.check()
        if isinstance(settings, ResumableSettings):
            settings.check_folders()
    except InputError as error:
        raise type(error)(error.with_flags()) from error
    return settings


def complete_repair(args: Sequence[str], defaults: RunSettings) -> list[str]:
    """Return the arguments with a value for a `--repair` that has none; `InputError` if a script cannot do that."""
    given, bare = [*args], [number for number, arg in enumerate(args) if arg == "--repair"]
    if bare and not hasattr(defaults, "repair"):
        why = getattr(defaults, "no_repair", "this script cannot go on when a rank dies")
        advice = "dp-ga and hybrid can; with --save-every, --max-restarts 3 begins again from the last checkpoint"
        raise FlagError(f"--repair: {why}; {advice}")
    for number in bare:
        if args[number + 1 :][:1] == [] or args[number + 1].startswith("--"):
            given[number] = "--repair=on"
    return given


def check_values(args: Sequence[str]) -> None:
    """Raise `InputError` for a flag whose value is empty; as a path, it would be the current folder."""
    for flag, value in zip(["", *args], args, strict=False):
        name, _, given = value.partition("=") if value.startswith("--") else (flag, "", value)
        is_empty = given == "" and ("=" in value or not value)
        require(not is_empty, f"{name or 'rank'} is given an empty value; is a variable of the shell not set?")


def as_json(settings: RunSettings) -> dict[str, Any]:
    """Return all settings except the rank, as JSON values: for `config.json`, and for the comparison between ranks."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(settings), default=str))
    del values["rank"]
    return values
