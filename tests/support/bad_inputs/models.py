"""Checkpoints, and models that are told from and imported: copies of whole ones, changed."""

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.bad_inputs.files import SHARD, STEP, damage, export, forge, make_run
from support.bad_inputs.inputs import PRIMER, PYTHON, BadInput
from support.processes import LAB


def put(*keys_and_value: Any) -> Callable[[dict[str, Any]], None]:
    """Set what is at some keys, one inside the other."""
    *keys, last, value = keys_and_value

    def change(record: dict[str, Any]) -> None:
        for key in keys:
            record = record[key]
        record[last] = value

    return change


def drop(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        for key in keys[:-1]:
            record = record[key]
        del record[keys[-1]]

    return change


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no step": drop("step"),
    "step is text": put("step", "four"),
    "step is negative": put("step", -4),
    "no model": drop("model"),
    "model is a list": put("model", []),
    "no dmodel": drop("model", "dmodel"),
    "dmodel is text": put("model", "dmodel", "wide"),
    "dmodel is zero": put("model", "dmodel", 0),
    "other width": put("model", "dmodel", 32),
    "other layers": put("model", "n_layers", 3),
    "other vocabulary": put("model", "vocab_size", 17),
    "hidden_dim is null": put("model", "hidden_dim", None),
    "norm_eps is text": put("model", "norm_eps", "small"),
    "no settings": drop("settings"),
    "settings is null": put("settings", None),
    "no files": drop("files"),
    "files is a list": put("files", ["tokenizer.model"]),
    "a file is a number": put("files", "tokenizer.model", 7),
    "no tokenizer": drop("files", "tokenizer.model"),
    "no shard": lambda record: record["files"].pop(SHARD),
    "a file elsewhere": put("files", "../../config.json", {"bytes": 1, "sha256": "0"}),
    "tokens is text": put("tokens", "many"),
    "no tokens": drop("tokens"),
    "position is text": put("position", "there"),
    "position is far": put("position", "offset", 10**9),
    "position is negative": put("position", "document", -3),
    "data is text": put("data", "sample!"),
    "data is a ghost": put("data", {"source": "/nowhere/ghost.txt", "bytes": 3, "sha256_of_first_mib": ""}),
    "optimizer": put("settings", "optimizer", "magic"),
    "lr is text": put("settings", "lr", "fast"),
    "lr is null": put("settings", "lr", None),
}


def change_tensors(step: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the tensors of a checkpoint, and make its checksums right again."""
    tensors = change(load_file(step / SHARD))
    save_file(tensors, step / SHARD, metadata={"format": "pt"})
    forge(step, lambda _: None)


def checkpoints(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    whole = make_run(folder.parent / "whole")
    one = "model.norm.weight"

    def damaged(name: str, how: str) -> Callable[[Path], None]:
        return lambda run: damage(run / STEP / name, how, chance)

    def swapped(run: Path) -> None:
        a, b, c = (run / STEP / name for name in (SHARD, "tokenizer.model", "c"))
        a.rename(c), b.rename(a), c.rename(b)

    def noise_inside(name: str, how: str) -> Callable[[Path], None]:
        def make(run: Path) -> None:
            damage(run / STEP / name, how, chance)
            forge(run / STEP, lambda _: None)

        return make

    def not_json(text: str) -> Callable[[Path], None]:
        def make(run: Path) -> None:
            (run / STEP / "checkpoint.json").write_text(text)

        return make

    names = (SHARD, "tokenizer.model", "checkpoint.json")
    makers: list[Callable[[Path], Any]] = [
        *(damaged(name, how) for name in names for how in ("cut", "flip", "empty", "missing", "noise", "folder")),
        *(damaged(name, "longer") for name in names[:2]),
        swapped,
        *(noise_inside(name, how) for name in names[:2] for how in ("cut", "empty", "noise")),
        *map(not_json, ("null", "[]", "{}", '{"sha256": 1}', "[" * 100_000, "NaN", '"text"')),
        *((lambda run, change=change: forge(run / STEP, change)) for change in FORGERIES.values()),
        lambda run: change_tensors(run / STEP, lambda tensors: {k: v for k, v in tensors.items() if one not in k}),
        lambda run: change_tensors(run / STEP, lambda tensors: {**tensors, one: torch.ones(3)}),
        lambda run: change_tensors(run / STEP, lambda tensors: {"something": torch.ones(3)}),
        lambda run: shutil.copy(run / STEP / SHARD, run / STEP / "copy.safetensors"),
        lambda run: shutil.rmtree(run / STEP),
    ]
    chance.shuffle(makers)
    more = ["--steps", "6", "--data", "sample", "--device", "cpu"]
    for number, maker in enumerate(itertools.islice(itertools.cycle(makers), count)):
        run = folder / str(number)

        def prepare(run: Path = run, maker: Callable[[Path], Any] = maker) -> None:
            shutil.copytree(whole, run)
            maker(run)

        where = run if chance.random() < 0.5 else run / STEP
        command = [PYTHON, str(LAB / PRIMER), *more, "--resume", str(where)]
        if chance.random() < 0.2:
            command = [str(LAB / "launch.sh"), "pp-dapple", *more, "--micro-batches", "1", "--resume", str(where)]
        yield BadInput("checkpoints", [command], (str(run), "checkpoint", "--"), prepare)


def models(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    folder.mkdir(parents=True)
    whole = export(make_run(folder.parent / "whole"), folder / "model")
    weights = "model.safetensors"

    def damaged(name: str, how: str) -> Callable[[Path], None]:
        return lambda model: damage(model / name, how, chance)

    def pickled(model: Path) -> None:
        (model / weights).unlink()
        torch.save({}, model / "pytorch_model.bin")

    makers: list[Callable[[Path], Any]] = [
        *(damaged(weights, how) for how in ("cut", "empty", "noise", "folder", "missing")),
        *(damaged("config.json", how) for how in ("cut", "empty", "noise", "folder", "missing")),
        *(damaged("tokenizer.model", how) for how in ("empty", "noise", "folder")),  # tokenizer.json takes its place
        pickled,
    ]
    chance.shuffle(makers)
    for number, maker in enumerate(itertools.islice(itertools.cycle(makers), count)):
        model = folder / str(number)

        def prepare(model: Path = model, maker: Callable[[Path], Any] = maker) -> None:
            shutil.copytree(whole, model)
            maker(model)

        command = [PYTHON, "-m", "simplellm.import_hf", str(model), str(folder / f"out-{number}")]
        if chance.random() < 0.4:
            command = [PYTHON, str(LAB / "primer/tell_story.py"), str(model)]
        yield BadInput("models", [command], (str(model), model.name), prepare)
