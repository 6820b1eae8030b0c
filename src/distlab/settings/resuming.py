"""The settings that a resumed run takes from its checkpoint, and the comparison with it; the layout may change."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from distlab.axes.layout import layout_flags, layout_size, replicas_in
from distlab.checkpoints import FOLDER, LLAMA
from distlab.checkpoints.format import Checkpoint, has_checkpoints, in_the_way, latest_valid, numbered
from distlab.machine.processes import NEWCOMER
from distlab.settings.resume_policy import ResumePolicy, marked
from simplellm.errors import InputError, as_flag, require
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

OF_SCHEDULE = "layers_per_stage", "chunks_per_stage", "keep_at_most"  # settings that go with a schedule


def saved_values(settings: Any, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings whose defaults come from the checkpoint, by name; `InputError` for a wrong type."""
    _check_architecture(settings, checkpoint)
    model, saved, layout = checkpoint.record["model"], checkpoint.record["settings"], checkpoint.layout
    values = {name: model[name] for name in marked(settings, ResumePolicy.MODEL) if name in model}
    policies, kinds = [ResumePolicy.FIXED, ResumePolicy.DEFAULT], get_type_hints(type(settings))
    if layout == settings.layout:
        policies.append(ResumePolicy.PER_REPLICA)
        # Another script may have a setting of this name with other choices.
        same = [name for name in marked(settings, ResumePolicy.SAME_LAYOUT) if name in saved]
        if chooses_program(settings, saved):
            same = [name for name in same if name not in ("schedule", *OF_SCHEDULE)]
        is_choice = {name: get_origin(kinds[name]) is Literal for name in same}
        values |= {name: saved[name] for name in same if not is_choice[name] or fits(saved[name], kinds[name])}
    values |= {name: saved[name] for name in marked(settings, *policies) if name in saved}
    replicas = max(1, replicas_in(settings.layout))  # the layout has not been checked yet
    for name, total in per_step(checkpoint, settings).items():
        if layout != settings.layout and total % replicas == 0:
            values[name] = total // replicas
    if checkpoint.record.get("data") and hasattr(settings, "data"):
        values["data"] = checkpoint.record["data"]["source"]
    for name, value in values.items():
        sentence = f"{checkpoint.folder}: its record has {value!r:.50} for {as_flag(name)}"
        require(fits(value, kinds[name]), sentence)
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return _saved_of_llama(settings, values, checkpoint) if settings.architecture == LLAMA else values


def check_checkpoint(settings: Any, checkpoint: Checkpoint) -> None:
    """Raise `InputError` if a run with these settings would not continue the run that wrote the checkpoint."""
    _check_architecture(settings, checkpoint)
    flag, record = f"--resume {settings.resume}", checkpoint.record
    usual = {field.name: field.default for field in fields(settings)}  # of sizes that a model need not have
    for name in marked(settings, ResumePolicy.MODEL):
        saved, own = record["model"].get(name, usual[name]), getattr(settings, name)
        if name == "num_kv_heads" and own is None:  # settings that no command line has completed from the checkpoint
            own = settings.num_heads
        require_same(f"{flag}: its model has", name, saved, own)
    for name in marked(settings, ResumePolicy.FIXED):
        own = getattr(settings, name)
        require_same(f"{flag}: it was trained with", name, record["settings"].get(name, own), own)
    for name, value in settings.lacks.items():
        saved = record["settings"].get(name, value)
        given = f"{flag}: it was trained with {as_flag(name)} {saved}, which the script for these flags does not have"
        asked = "resume it with the script that wrote it, and only with flags of that script"
        require(saved == value, f"{given}; {asked}")
    tokenizer = settings.tokenizer_model
    is_same = tokenizer is None or checkpoint.has_tokenizer(tokenizer)
    given = f"--tokenizer {tokenizer}; leave --tokenizer out"
    given = "the one that comes with the lab" if tokenizer == SHIPPED_MODEL else given
    require(is_same, f"{flag}: it was trained with another tokenizer than {given}")
    check_data(checkpoint, settings.data_identity)
    if settings.architecture == LLAMA:
        _check_llama(settings, checkpoint)


def _saved_of_llama(settings: Any, values: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Complete `saved_values` for a run that trains the lab's Llama."""
    model = checkpoint.record["model"]
    values.setdefault("seq_len", min(settings.seq_len, model["ctx_size"]))  # an imported model has no settings
    if values.get("batch_size", 0) % max(1, values.get("micro_batches", settings.micro_batches)):
        del values["batch_size"]  # from a different layout, with a different number of micro-batches
    if not checkpoint.has_tokenizer(SHIPPED_MODEL):
        values["tokenizer"] = checkpoint.tokenizer
    return values


def _check_llama(settings: Any, checkpoint: Checkpoint) -> None:
    """Complete `check_checkpoint` for a run that trains the lab's Llama."""
    flag, model = f"--resume {settings.resume}", checkpoint.record["model"]
    can_have = hasattr(settings, "experts") or not model.get("experts")
    require(can_have, f"{flag}: its model has experts; resume it with a script that has --experts (ep or 5d)")
    has_them = model.get("experts") or not getattr(settings, "experts", 0)
    require(has_them, f"{flag}: its model has no experts; resume it with a script that needs none, such as dp-ga")
    most, has, reads = model["ctx_size"], model["vocab_size"], SPTokenizer(settings.tokenizer).vocab_size
    require(
        settings.seq_len <= most, f"{flag}: its model reads {most} tokens at most, not --seq-len {settings.seq_len}"
    )
    require(has == reads, f"{flag}: its model has {has} tokens but its tokenizer has {reads}")
    same_ranks = settings.per_rank_optimizer_state and settings.layout == checkpoint.layout
    ranks, advice = layout_size(checkpoint.layout), f"the same script and {layout_flags(checkpoint.layout)}"
    sentence = f"each of its {ranks} ranks kept {settings.optimizer}'s moments of its own gradients, which cannot "
    sentence += f"be used in another layout; resume with {advice}"
    require(same_ranks or not checkpoint.per_rank_optimizer_state, f"{flag}: {sentence}")


def remarks(settings: Any, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield lines to print on where a run resumes, on its data, and on settings that change its course."""
    yield f"resuming from {checkpoint.folder}, after {checkpoint.step:,} step{'s' * (checkpoint.step != 1)}"
    saved, data = checkpoint.record["settings"], checkpoint.record.get("data") or {}
    if "bytes" in data and data["source"] == getattr(settings, "data", None):
        yield f"its data is in {data['source']}, a file of this machine that the checkpoint names"
    for name, before in per_step(checkpoint, settings).items():
        now = getattr(settings, name) * replicas_in(settings.layout)
        if now != before:
            yield f"the global batch is now {now} and was {before}: {as_flag(name)} sets it"
    if settings.architecture == LLAMA:
        length = saved.get("steps", settings.steps)
        if settings.lr_schedule != "constant" and length != settings.steps:
            lrs = [replace(settings, steps=steps).learning_rate(checkpoint.step) for steps in (length, settings.steps)]
            sentence = f"the learning rate now falls until step {settings.steps:,}, not {length:,}"
            yield f"{sentence}: it is now {lrs[1]:.3g} instead of {lrs[0]:.3g}; --steps sets it"
    if hasattr(settings, "schedule") and chooses_program(settings, saved):
        followed = f"the checkpoint's run followed --schedule {saved['schedule']}; this one follows {settings.schedule}"
        yield f"{followed}: a file is a program, so no checkpoint chooses it"


def chooses_program(settings: Any, saved: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's schedule is a file, which would be run, and this run's is not one.

    No checkpoint may choose a program.
    """
    from distlab.pipeline.schedules import is_file

    return is_file(str(saved.get("schedule"))) and not is_file(getattr(settings, "schedule", ""))


def check_folders(settings: Any) -> None:
    """Raise `InputError` if the run cannot resume from `--resume`, or `--out` has checkpoints of another run."""
    if NEWCOMER in os.environ:  # the run itself has checkpoints by now
        return
    resumed, out = None, settings.out
    if settings.resume is not None:
        resumed = latest_valid(settings.resume, at_a_glance=True)
        settings.check_checkpoint(resumed)
    if out is not None and has_checkpoints(out):
        is_own = resumed is not None and resumed.is_of_run(out)
        require(is_own, f"--out {out}: has checkpoints of another run; give another folder, or --resume {out}")
    elif out is not None and settings.save_every:
        for path in numbered(out / FOLDER).values():
            raise in_the_way(out, path)


def _check_architecture(settings: Any, checkpoint: Checkpoint) -> None:
    own, its = settings.architecture, checkpoint.architecture
    sentence = f"its model is of the architecture {its}, not {own}; give a run of the same model"
    require(own == its, f"--resume {settings.resume}: {sentence}")


def per_step(checkpoint: Checkpoint, settings: Any) -> dict[str, int]:
    """Return the consumption of a step of the checkpoint's run on all replicas, by the setting for one replica."""
    saved = checkpoint.record["settings"]
    counts = {name: saved[name] for name in marked(settings, ResumePolicy.PER_REPLICA) if name in saved}
    replicas = replicas_in(checkpoint.layout)
    return {name: count * replicas for name, count in counts.items() if isinstance(count, int)}


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value from a checkpoint's record has the type of a field."""
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return isinstance(value, list) and len(value) == len(parts) and all(map(fits, value, parts))
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
    if float in kinds:
        kinds.add(int)
    return type(value) in kinds or any(value in get_args(kind) for kind in kinds if get_origin(kind) is Literal)


def require_same(what: str, name: str, saved: Any, own: Any) -> None:
    """Raise `InputError` unless a setting has the checkpoint's value; `what` is the beginning of the message."""
    require(saved == own, f"{what} {as_flag(name)} {saved}, not {own}; leave that flag out")


def check_data(checkpoint: Checkpoint, own: dict[str, Any] | None) -> None:
    """Raise `InputError` if a run's data are known to differ from the checkpoint's."""
    data = checkpoint.record.get("data")
    if data and own and _content(data) != _content(own):
        seed = f" and --seed {data['seed']}" if "seed" in data else ""
        source = f"--data {data['source']}{seed}"
        raise InputError(f"{checkpoint.folder}: it was trained on {source}; leave out the flags that differ")


def file_identity(data: str) -> dict[str, Any]:
    """Return a record that identifies a file, or a folder of files."""
    path = Path(os.path.expanduser(data))  # unchanged where there is no home folder
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    beginnings = hashlib.sha256()
    for part in files:
        if part != path:
            beginnings.update(f"{part.relative_to(path)} {part.stat().st_size} ".encode())
        with part.open("rb") as file:
            beginnings.update(file.read(1 << 20))
    size_bytes = sum(part.stat().st_size for part in files)
    return {"source": str(path.absolute()), "bytes": size_bytes, "sha256_of_first_mib": beginnings.hexdigest()}


def _content(data: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of data without the path: a file or folder that was moved is still the same."""
    return {key: value for key, value in data.items() if key != "source" or "bytes" not in data}
