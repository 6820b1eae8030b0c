"""What a run that goes on takes over from its checkpoint, and what has to be as it was.

The layout and all that concerns speed may change: what a checkpoint holds says nothing of them. So may learning rate
and precision, which are the checkpoint's unless other ones are given, and the batch size, where steps are not counted
in epochs.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from distlab.checkpoints.format import TOKENIZER, Checkpoint, checksum
from simplellm.errors import InputError
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

if TYPE_CHECKING:
    from distlab.run.settings import ResumableSettings, TrainSettings

SettingsT = TypeVar("SettingsT", bound="ResumableSettings")


@dataclass(frozen=True)
class ResumePolicy(Generic[SettingsT]):
    """Which of a script's settings, by name, are those of the checkpoint that a run goes on from.

    Attributes:
        architecture: of the model that the script trains, as checkpoints call it.
        sizes: of that model; they have to be the checkpoint's.
        fixed: others that have to be.
        defaults: those that are the checkpoint's unless other values are given.
        layout_defaults: the same, but only in the layout that the checkpoint comes from: those of the batch and its
            order, so that the same command goes on bit for bit.
    """

    architecture: str
    sizes: tuple[str, ...]
    fixed: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()
    layout_defaults: tuple[str, ...] = ()

    def values(self, checkpoint: Checkpoint, given: SettingsT) -> dict[str, Any]:
        """Settings, by name, for which the checkpoint's values take the place of the script's defaults.

        Raises:
            InputError: the checkpoint is that of another architecture.
        """
        self._check_architecture(checkpoint, given)
        model, settings = checkpoint.record["model"], checkpoint.record["settings"]
        values = {name: model[name] for name in self.sizes if name in model}
        same_layout = checkpoint.record.get("layout") == given.layout
        names = self.fixed + self.defaults + (self.layout_defaults if same_layout else ())
        values |= {name: settings[name] for name in names if name in settings and hasattr(given, name)}
        if checkpoint.record.get("data") and hasattr(given, "data"):
            values["data"] = checkpoint.record["data"]["source"]
        return values

    def check(self, checkpoint: Checkpoint, settings: SettingsT) -> None:
        """Raise `InputError` if a run with these settings would not be the one that the checkpoint was taken from."""
        self._check_architecture(checkpoint, settings)
        resume, record = f"--resume {settings.resume}", checkpoint.record
        for name in self.sizes:
            require_same(f"{resume}: its model has", name, record["model"].get(name), getattr(settings, name))
        for name in self.fixed:
            own = getattr(settings, name)
            require_same(f"{resume}: it was trained with", name, record["settings"].get(name, own), own)
        tokenizer = settings.tokenizer_model
        if tokenizer is not None and checksum(tokenizer) != _tokenizer_checksum(checkpoint):
            given = "the one that comes with the lab"
            if tokenizer != SHIPPED_MODEL:
                given = f"--tokenizer {tokenizer}; leave --tokenizer out"
            raise InputError(f"{resume}: it was trained with another tokenizer than {given}")
        check_data(checkpoint, settings.data_identity)

    def _check_architecture(self, checkpoint: Checkpoint, settings: SettingsT) -> None:
        if checkpoint.architecture != self.architecture:
            raise InputError(
                f"--resume {settings.resume}: its model is of the architecture {checkpoint.architecture}, not "
                f"{self.architecture}; give a run of the same model"
            )


class LlamaResumePolicy(ResumePolicy["TrainSettings"]):
    """That of the scripts that train the lab's Llama, which may have been imported: then no settings come with it."""

    def values(self, checkpoint: Checkpoint, given: "TrainSettings") -> dict[str, Any]:
        values, model = super().values(checkpoint, given), checkpoint.record["model"]
        values.setdefault("seq_len", min(given.seq_len, model["ctx_size"]))
        values["num_kv_heads"] = None if model["num_kv_heads"] == model["num_heads"] else model["num_kv_heads"]
        if checksum(SHIPPED_MODEL) != _tokenizer_checksum(checkpoint):
            values["tokenizer"] = checkpoint.tokenizer
        return values

    def check(self, checkpoint: Checkpoint, settings: "TrainSettings") -> None:
        super().check(checkpoint, settings)
        resume, record = f"--resume {settings.resume}", checkpoint.record
        model, num_kv_heads = record["model"], settings.num_kv_heads or settings.num_heads
        require_same(f"{resume}: its model has", "num_kv_heads", model["num_kv_heads"], num_kv_heads)
        if settings.seq_len > model["ctx_size"]:
            raise InputError(
                f"{resume}: its model reads {model['ctx_size']} tokens at most, not --seq-len {settings.seq_len}"
            )
        vocab_size = SPTokenizer(settings.tokenizer).vocab_size
        if vocab_size != model["vocab_size"]:
            raise InputError(f"{resume}: its model has {model['vocab_size']} tokens, and its tokenizer {vocab_size}")
        if record.get("own_moments") and not (
            settings.per_rank_optimizer_state and settings.layout == record["layout"]
        ):
            ranks, optimizer = record.get("world_size"), settings.optimizer
            raise InputError(
                f"{resume}: each of its {ranks} ranks kept {optimizer}'s moments of its own gradients, which mean "
                f"nothing to another layout; resume with dp-wa and --world-size {ranks}"
            )


def require_same(what: str, name: str, saved: Any, own: Any) -> None:
    """Raise `InputError` unless a setting has the checkpoint's value; `what` begins the sentence."""
    if saved != own:
        raise InputError(f"{what} --{name.replace('_', '-')} {saved}, not {own}; leave that flag out")


def check_data(checkpoint: Checkpoint, own: dict[str, Any] | None) -> None:
    """Raise `InputError` unless a run's data, by their `data_identity` if it is known, are those of the checkpoint."""
    data = checkpoint.record.get("data")
    if data and own and _content(data) != _content(own):
        seed = f" and --seed {data['seed']}" if "seed" in data else ""
        raise InputError(
            f"{checkpoint.folder}: it was trained on --data {data['source']}{seed}; leave out the flags that differ"
        )


def data_identity(data: str, seed: int) -> dict[str, Any]:
    """What tells one source of texts from another.

    Args:
        data: "sample", a data set's name on the hub, or a path.
        seed: the generator's.
    """
    if data == "sample":
        return {"source": data, "seed": seed}
    if data in ("tinystories", "imdb"):
        return {"source": data}
    path = Path(data).expanduser()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    beginnings, size_bytes = hashlib.sha256(), 0
    for part in files:
        size_bytes += part.stat().st_size
        if part != path:
            beginnings.update(f"{part.relative_to(path)} {part.stat().st_size} ".encode())
        with part.open("rb") as file:
            beginnings.update(file.read(1 << 20))
    return {"source": str(path.absolute()), "bytes": size_bytes, "sha256_of_first_mib": beginnings.hexdigest()}


def _content(data: dict[str, Any]) -> dict[str, Any]:
    """A file, or a folder of them, is the same wherever it lies."""
    return {key: value for key, value in data.items() if key != "source" or "bytes" not in data}


def _tokenizer_checksum(checkpoint: Checkpoint) -> str | None:
    file = checkpoint.record["files"].get(TOKENIZER)
    return file and str(file["sha256"])
