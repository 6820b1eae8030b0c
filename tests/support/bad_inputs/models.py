"""Checkpoints, and models that are told from, exported and imported: copies of whole ones, changed."""

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.bad_inputs.files import SHARD, STEP, damage, export, forge, make_run
from support.bad_inputs.inputs import PRIMER, PYTHON, SCRIPTS, BadInput, command_of
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
    for number, maker in enumerate(itertools.islice(itertools.cycle(makers), count - 8)):
        run = folder / str(number)

        def prepare(run: Path = run, maker: Callable[[Path], Any] = maker) -> None:
            shutil.copytree(whole, run)
            maker(run)

        where = run if chance.random() < 0.5 else run / STEP
        command = [PYTHON, str(LAB / PRIMER), *more, "--resume", str(where)]
        if chance.random() < 0.2:
            command = [str(LAB / "launch.sh"), "pp-dapple", *more, "--micro-batches", "1", "--resume", str(where)]
        yield BadInput("checkpoints", [command], (str(run), "checkpoint", "--"), prepare)
    for text in (*("--steps 4", "--dmodel 32", "--seq-len 64", "--optimizer sgd", "--seed 5", "--n-layers 5"),):
        command = [PYTHON, str(LAB / PRIMER), *more, "--resume", str(whole), *text.split()]
        yield BadInput("checkpoints", [command], ("--resume", text.split()[0]))
    for name in ("mlp", "sentiment"):
        yield BadInput("checkpoints", [command_of(SCRIPTS[name], ["--resume", str(whole)])], ("architecture",))


CONFIGURATIONS: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": "many",
    "hidden_size": 0,
    "intermediate_size": -4,
    "num_hidden_layers": 2.5,
    "num_attention_heads": 7,
    "num_key_value_heads": 5,
    "head_dim": 3,
    "max_position_embeddings": None.__class__.__name__,
    "rms_norm_eps": "1e-6",
    "hidden_act": "gelu",
    "attention_bias": True,
    "quantization_config": {"bits": 4},
    "rope_parameters": {"rope_type": "yarn", "factor": 4},
    "rope_scaling": [1, 2],
}


def models(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    folder.mkdir(parents=True)
    run = make_run(folder.parent / "whole")
    whole = export(run, folder / "model")
    weights = "model.safetensors"

    def damaged(name: str, how: str) -> Callable[[Path], None]:
        return lambda model: damage(model / name, how, chance)

    def configured(**changes: Any) -> Callable[[Path], None]:
        def make(model: Path) -> None:
            path = model / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))

        return make

    def retensored(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
        return lambda model: save_file(change(load_file(model / weights)), model / weights)

    def pickled(model: Path) -> None:
        (model / weights).unlink()
        torch.save({}, model / "pytorch_model.bin")

    def indexed(content: Any) -> Callable[[Path], None]:
        def make(model: Path) -> None:
            (model / weights).unlink()
            (model / f"{weights}.index.json").write_text(json.dumps(content))

        return make

    norm = "model.norm.weight"
    makers: list[Callable[[Path], Any]] = [
        *(damaged(weights, how) for how in ("cut", "empty", "noise", "folder", "missing")),
        *(damaged("config.json", how) for how in ("cut", "empty", "noise", "folder", "missing")),
        *(damaged("tokenizer.model", how) for how in ("empty", "noise", "folder")),  # tokenizer.json takes its place
        *(configured(**{key: value}) for key, value in CONFIGURATIONS.items()),
        retensored(lambda tensors: {k: v for k, v in tensors.items() if k != norm}),
        retensored(lambda tensors: tensors | {norm: torch.ones(3)}),
        retensored(lambda tensors: tensors | {norm: tensors[norm].long()}),
        retensored(lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}),
        *map(indexed, ({}, [], {"weight_map": {"x": "../../etc/passwd"}}, {"weight_map": {norm: "ghost.safetensors"}})),
        pickled,
    ]
    chance.shuffle(makers)
    for number, maker in enumerate(itertools.islice(itertools.cycle(makers), count - 8)):
        model = folder / str(number)

        def prepare(model: Path = model, maker: Callable[[Path], Any] = maker) -> None:
            shutil.copytree(whole, model)
            maker(model)

        command = [PYTHON, "-m", "simplellm.import_hf", str(model), str(folder / f"out-{number}")]
        if chance.random() < 0.4:
            command = [PYTHON, str(LAB / "primer/tell_story.py"), str(model)]
        yield BadInput("models", [command], (str(model), model.name), prepare)
    tell = [PYTHON, str(LAB / "primer/tell_story.py")]
    into = [PYTHON, "-m", "simplellm.export"]
    for command, name in (
        ([*tell, str(folder / "ghost")], "ghost"),
        ([*tell, str(run), "--top-p", chance.choice(["0", "1.5", "nan", "-1"])], "--top-p"),
        ([*tell, str(run), "--temperature", chance.choice(["-1", "nan", "inf", "hot"])], "--temperature"),
        ([*tell, str(run), "--max-tokens", chance.choice(["0", "-3", "many"])], "--max-tokens"),
        ([*tell, str(run), "--prompt", "word " * 200], "--prompt"),
        ([*into, str(run), str(whole)], str(whole)),
        ([*into, str(folder / "ghost"), str(folder / "new")], "ghost"),
        ([*into, str(run), "/dev/null/model"], "/dev/null/model"),
    ):
        yield BadInput("models", [command], (name,))
