"""What a run that goes on takes over from its checkpoint, and what has to be as it was.

The layout, the batch size and all that concerns speed may change: what a checkpoint holds says nothing of them. So may
learning rate, precision and sequence length, which are the checkpoint's unless other ones are given.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.checkpoints import TOKENIZER, Checkpoint, checksum
from simplellm.errors import InputError
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

if TYPE_CHECKING:
    from distlab.settings import TrainSettings

MODEL = ("dmodel", "num_heads", "n_layers")
TRAINING = ("seq_len", "seed", "optimizer", "lr", "dtype")
OF_THE_LAYOUT = ("batch_size", "micro_batches", "schedule", "layers_per_stage", "sync_every")


def inherited(checkpoint: Checkpoint, given: "TrainSettings") -> dict[str, Any]:
    """Settings, by name, for which the checkpoint's values take the place of the script's defaults.

    In the layout that the checkpoint comes from, those of the batch and its order too: so the same command goes on bit
    for bit.
    """
    model, settings = checkpoint.record["model"], checkpoint.record["settings"]
    values = {name: model[name] for name in MODEL}
    values["num_kv_heads"] = None if model["num_kv_heads"] == model["num_heads"] else model["num_kv_heads"]
    values["seq_len"] = min(given.seq_len, model["ctx_size"])
    same_layout = checkpoint.record.get("layout") == given.layout
    names = TRAINING + (OF_THE_LAYOUT if same_layout else ())
    values |= {name: settings[name] for name in names if name in settings and hasattr(given, name)}
    if checkpoint.record.get("data"):
        values["data"] = checkpoint.record["data"]["source"]
    if checksum(SHIPPED_MODEL) != _tokenizer_checksum(checkpoint):
        values["tokenizer"] = checkpoint.tokenizer
    return values


def check(checkpoint: Checkpoint, settings: "TrainSettings") -> None:
    """Raise `InputError` if a run with these settings would not be the one that the checkpoint was taken from."""
    resume, record = f"--resume {settings.resume}", checkpoint.record
    model = record["model"]
    own = {name: getattr(settings, name) for name in MODEL}
    own["num_kv_heads"] = settings.num_kv_heads or settings.num_heads
    for name, value in own.items():
        if value != model[name]:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{resume}: its model has {flag} {model[name]}, not {value}; leave that flag out")
    if settings.seq_len > model["ctx_size"]:
        raise InputError(
            f"{resume}: its model reads {model['ctx_size']} tokens at most, not --seq-len {settings.seq_len}"
        )
    if checksum(settings.tokenizer or SHIPPED_MODEL) != _tokenizer_checksum(checkpoint):
        given = f"--tokenizer {settings.tokenizer}" if settings.tokenizer else "the one that comes with the lab"
        raise InputError(f"{resume}: it was trained with another tokenizer than {given}; leave --tokenizer out")
    vocab_size = SPTokenizer(settings.tokenizer).vocab_size
    if vocab_size != model["vocab_size"]:
        raise InputError(f"{resume}: its model has {model['vocab_size']} tokens, and its tokenizer {vocab_size}")
    if settings.data != "auto":
        check_data(checkpoint, data_identity(settings.data, settings.seed))
    trained_with = record["settings"].get("optimizer", settings.optimizer)
    if settings.optimizer != trained_with:
        raise InputError(f"{resume}: it was trained with --optimizer {trained_with}, not {settings.optimizer}")
    ranks = record.get("world_size")
    if record.get("own_moments") and not (settings.own_moments and settings.layout == record["layout"]):
        raise InputError(
            f"{resume}: each of its {ranks} ranks kept {trained_with}'s moments of its own gradients, which mean "
            f"nothing to another layout; resume with dp-wa and --world-size {ranks}"
        )


def check_data(checkpoint: Checkpoint, own: dict[str, Any]) -> None:
    """Raise `InputError` unless a run's stories, by their `data_identity`, are those of the checkpoint."""
    data = checkpoint.record.get("data")
    if data and _content(data) != _content(own):
        seed = f" and --seed {data['seed']}" if "seed" in data else ""
        raise InputError(
            f"{checkpoint.folder}: it was trained on --data {data['source']}{seed}; leave out the flags that differ"
        )


def data_identity(data: str, seed: int) -> dict[str, Any]:
    """What tells one source of stories from another.

    Args:
        data: "sample", "tinystories" or a path.
        seed: the generator's.
    """
    if data == "sample":
        return {"source": data, "seed": seed}
    if data == "tinystories":
        return {"source": data}
    path = Path(data).expanduser()
    with path.open("rb") as file:
        beginning = hashlib.sha256(file.read(1 << 20)).hexdigest()
    return {"source": str(path.absolute()), "bytes": path.stat().st_size, "sha256_of_first_mib": beginning}


def _content(data: dict[str, Any]) -> dict[str, Any]:
    """A file is the same wherever it lies."""
    return {key: value for key, value in data.items() if key != "source" or "bytes" not in data}


def _tokenizer_checksum(checkpoint: Checkpoint) -> str:
    return str(checkpoint.record["files"][TOKENIZER]["sha256"])
