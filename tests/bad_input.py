"""Inputs that cannot work, made by the hundred from a seed, and what the lab does with each of them.

    python tests/bad_input.py                      200 of them, each in a process of its own
    python tests/bad_input.py --count 500 --seed 7
    python tests/bad_input.py --only 17 --keep DIR the 17th alone; its files stay in DIR

Every input is bad by construction: nothing here could be a legal wish. It has to end with a status that is not 0,
within 15 seconds, with one sentence on stderr that names what is wrong, without a traceback and without a process left
behind.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import random
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import typing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import chapters
import pyarrow
import sentencepiece
import torch
from processes import LAB, free_port
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from distlab.launch import TOPOLOGIES
from distlab.run.progress import each
from distlab.run.settings import RunSettings
from simplellm.tokenizers import SHIPPED_MODEL

SECONDS = 15.0  # within which each has to end
MEMORY_BYTES = 12 * 2**30  # of address space for each process, so that a value taken seriously spares this machine
PYTHON = sys.executable
PRIMER = "primer/intro.py"
TINY = "--device cpu --data sample --dmodel 16 --num-heads 2 --n-layers 2 --seq-len 16 --batch-size 1 --steps 4".split()
OVERLONG = "a" * 5000

SCRIPTS = {  # by the name of a topology, but for those of mpi and for flags that only choose a schedule
    name: command.split()[0] for name, command in TOPOLOGIES.items() if name not in ("mpi", "pp-gpipe", "quickstart")
}


@dataclass
class BadInput:
    """An input that cannot work.

    Attributes:
        kind: which generator made it.
        commands: that are started together; the last one is looked at, the others have to end too.
        names: the sentence has to contain one of them.
        prepare: makes its files.
    """

    kind: str
    commands: list[list[str]]
    names: Sequence[str] = ()
    prepare: Callable[[], object] = lambda: None


@dataclass
class Outcome:
    """What became of one."""

    bad: BadInput
    seconds: float
    sentence: str
    problems: list[str] = field(default_factory=list)


# Flags: read from the scripts' settings, so that a new flag is covered by what its type cannot be

MAY_BE_ZERO = {"seed", "dropout"}
MAY_BE_NEGATIVE = {"seed"}
MAY_BE_HUGE = {"lr"}  # it ends with a loss that is no number
BAD_TEXT = {
    "data": ["nothing-there.txt", "ghost.parquet", "/", ".", "a.docx", "", OVERLONG + ".txt", "/dev/null", "здесь.txt"],
    "schedule": ["", "GPIPE", "1f1b1b", "нет"],
    "layers_per_stage": ["", "a,b", "99,1,1", "1,2", "-1,4,3", "6", "2,2,2,", "0,0,0"],
    "shapes": ["", "2x2", "0x4x4", "axbxc", "4x4x4x4", "4x4x-4", "4*4*4"],
    "master_addr": ["no.such.host.invalid", "256.1.1.1", "a b", "ж" * 80, "198.51.100.7"],
}
BAD_PATHS = {
    "out": ["/dev/null", "/dev/null/run", OVERLONG],
    "tokenizer": ["nothing-there.model", "/", "/dev/null", "", OVERLONG, str(LAB / "README.md")],
    "resume": ["nothing-there", "/dev/null", "/", OVERLONG, str(LAB / "README.md")],
}
ONE_PROCESS_IGNORES = {"master_addr"}
LATER = {"master_addr"}  # not looked at before the ranks meet


@functools.cache
def defaults_of(script: str) -> Any:
    """A script's own settings."""
    sys.path.insert(0, str((LAB / script).parent))  # some have modules beside them
    return chapters.load(script).DEFAULTS


def fields_of(settings: RunSettings) -> dict[str, Any]:
    """The flags of a script and their types, without the rank."""
    hints = typing.get_type_hints(type(settings))
    return {flag.name: hints[flag.name] for flag in dataclasses.fields(settings) if flag.name != "rank"}


def bad_values(name: str, kind: Any) -> list[list[str]]:
    """What a flag cannot be, as the arguments that follow it."""
    alternatives = [part for part in typing.get_args(kind) if part is not type(None)]
    if typing.get_origin(kind) is Literal:
        return [[value] for value in ("", "nonsense", str(alternatives[0]).upper() + "x", "ü", "0")]
    if typing.get_origin(kind) is list:
        return bad_values(name, alternatives[0])
    if alternatives:  # or None, which can be asked for by that name
        return [value for value in bad_values(name, alternatives[0]) if value != ["None"]]
    if kind is bool:
        return []  # a flag without a value
    if kind in (int, float):
        values = ["", "x", "три", "1,5", "0x", "-", "1 2", "nan", "None"]
        values += ["1.5", "inf", "1e3"] if kind is int else ["inf", "-inf"]
        values += [] if name in MAY_BE_ZERO else ["0"]
        values += [] if name in MAY_BE_NEGATIVE else ["-1", "-7"]
        values += [] if name in MAY_BE_HUGE else [f"1{'0' * 30}"]
        return [[value] for value in values]
    if kind is str:
        return [[value] for value in BAD_TEXT[name]]
    if kind is Path:
        return [[value] for value in BAD_PATHS[name]]
    raise TypeError(f"--{name}: what is a bad {kind}? tell {__file__}")


def flag_cases(script: str) -> Iterator[tuple[str, list[str]]]:
    """Every flag of a script with every value that it cannot have, and what the sentence names."""
    defaults = defaults_of(script)
    for name, kind in fields_of(defaults).items():
        if not (name in ONE_PROCESS_IGNORES and not defaults.layout):
            flag = f"--{name.replace('_', '-')}"
            for value in bad_values(name, kind):
                if name == "data" and script.startswith("TP/sentiment") and value in (["/"], ["."]):
                    continue  # folders are looked into only when they are read
                yield flag, [flag, *value]
    for rank in ("-5", "99", "x", "1.0", "", "два"):
        yield "rank", [rank]
    for nothing in ("--no-such-flag", "--stepz=3", "-q"):
        yield nothing.partition("=")[0], ["0", nothing]


def command_of(script: str, flags: Sequence[str], rank: str = "0") -> list[str]:
    """A script in a terminal of its own."""
    return [PYTHON, str(LAB / script), *([rank] if defaults_of(script).layout else []), *flags]


def flags(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    """Of all flags of all scripts; every name of a flag, and every script, comes once before any comes again."""
    cases = [(name, flag, args) for name, script in SCRIPTS.items() for flag, args in flag_cases(script)]
    chance.shuffle(cases)
    seen: Counter[str] = Counter()
    for _ in range(count):
        case = min(cases, key=lambda case: max(seen[case[0]] / 4, seen[case[1]]))
        cases.remove(case)
        name, flag, args = case
        seen.update((name, flag))
        by_launcher = chance.random() < 0.3 and flag not in LATER and flag != "--master-addr"
        if flag == "rank" or flag.startswith("--no-such") or flag in ("--stepz", "-q"):
            command = [PYTHON, str(LAB / SCRIPTS[name]), *args]
        elif by_launcher:
            command = [str(LAB / "launch.sh"), name, *args]
        else:
            command = command_of(SCRIPTS[name], [*args, *(["--timeout", "5"] if flag != "--timeout" else [])])
        wanted = ("rank", "RANK") if flag == "rank" else (flag, *args[1:2])
        yield BadInput("flags", [command], wanted)


# Flags that are right one by one

COMBINATIONS = [
    ("dp-ga", "--batch-size 3 --micro-batches 2", "--micro-batches"),
    ("hybrid", "--batch-size 4 --micro-batches 3", "--micro-batches"),
    ("pp-dapple", "--batch-size 1 --micro-batches 3", "--micro-batches"),
    ("primer", "--dmodel 288 --num-heads 7", "--num-heads"),
    ("primer", "--dmodel 30 --num-heads 6", "--num-heads"),
    ("primer", "--num-heads 6 --num-kv-heads 4", "--num-kv-heads"),
    ("dp-ga", "--hidden-dim -8", "--hidden-dim"),
    ("tp", "--world-size 4 --num-heads 6", "--num-heads"),
    ("tp", "--world-size 2 --num-heads 6 --num-kv-heads 3", "--num-kv-heads"),
    ("hybrid", "--dp 1 --pp 1 --tp 4", "--num-heads"),
    ("hybrid", "--pp 9 --n-layers 4", "--n-layers"),
    ("pp-1f1b", "--world-size 12", "--n-layers"),
    ("pp-dapple", "--layers-per-stage 2,2,3", "--layers-per-stage"),
    ("pp-dapple", "--layers-per-stage 3,3", "--layers-per-stage"),
    ("hybrid", "--layers-per-stage 3,0,3", "--layers-per-stage"),
    ("hybrid", "--dp 0", "--dp"),
    ("hybrid", "--dp 2 --pp -3", "--pp"),
    ("ddp", "--backend nccl --device cpu", "--backend"),
    ("mlp-ddp", "--backend nccl --device cpu", "--backend"),
    ("dp-ga", "--all-reduce ring --backend nccl", "--backend"),
    ("collectives", "--backend nccl", "--backend"),
    ("dp-wa", "--save-every 3 --sync-every 2", "--sync-every"),
    ("tp", "--tp-style naive --sequence-parallel", "--sequence-parallel"),
    ("sentiment", "--world-size 3 --tp 2", "--tp"),
    ("sentiment", "--tp 2 --heads 3", "--heads"),
    ("sentiment", "--dim 10 --heads 4", "--dim"),
    ("sentiment", "--samples 8 --bsz 16", "--bsz"),
    ("sentiment", "--dropout 1", "--dropout"),
    ("mlp", "--batch-size 200 --train-size 100", "--train-size"),
    ("mlp-mydp", "--batch-size 40 --train-size 100", "--train-size"),
    ("deadlock", "--world-size 1", "--world-size"),
    ("race", "--processes 1", "--processes"),
    ("primer", "--seq-len 1", "--seq-len"),
    ("primer", f"--seed {2**63}", "--seed"),
    ("mydp", "--seed -99999999999999999999", "--seed"),
    ("primer", "--timeout 1e9", "--timeout"),
    ("dp-wa", "--master-port 70000", "--master-port"),
]
WITHOUT_GPU = [(name, "--device cuda", "--device") for name in ("primer", "dp-ga", "hybrid", "mlp", "sentiment")]


def combinations(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    cases = [*COMBINATIONS, *([] if torch.cuda.is_available() else WITHOUT_GPU)]
    chance.shuffle(cases)
    for name, text, flag in itertools.islice(itertools.cycle(cases), count):
        # A device that is not there is seen by the rank that looks for it, not by the launcher.
        by_launcher = chance.random() < 0.3 and text != "--device cuda"
        args = text.split()
        command = [str(LAB / "launch.sh"), name, *args] if by_launcher else command_of(SCRIPTS[name], args)
        yield BadInput("combinations", [command], (flag,))


# Files of stories

STORY = "Once upon a time there was a rank that waited."


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def noise(chance: random.Random, size: int) -> bytes:
    """Random bytes that are no UTF-8 in any line."""
    return b"\xff" + bytes(chance.choice((byte, byte, 0xFE)) for byte in chance.randbytes(size)) + b"\xff"


def table(path: Path, columns: dict[str, list[Any]]) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path.read_bytes()


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(1, len(content) - 1)]


def special(path: Path, how: str) -> None:
    """Something at a path that is no plain file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path)
    else:
        path.symlink_to(how)


def data(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    good = json.dumps({"text": STORY}) + "\n"
    ok = table(folder / "whole.parquet", {"text": [STORY] * 50})
    lines: dict[str, bytes | str] = {
        "empty": "",
        "blank": " \n\t\n\n",
        "noise": noise(chance, 2000),
        "utf16": STORY.encode("utf-16"),
        "latin1": (STORY + " Ein Märchen.\n").encode("latin-1"),
    }
    contents = {
        **{f"{name}.txt": content for name, content in lines.items()},
        **{f"{name}.jsonl": content for name, content in lines.items()},
        "markers.txt": "<|endoftext|>\n" * 30,
        "cut.jsonl": good * 3 + good[: chance.randrange(3, len(good) - 3)],
        "list.jsonl": '["text"]\n',
        "other.jsonl": '{"story": "no text"}\n',
        "number.jsonl": '{"text": 5}\n',
        "null.jsonl": '{"text": null}\n',
        "half.jsonl": '{"text": "\\ud800"}\n',
        "deep.jsonl": "[" * 100_000 + "\n",
        "digits.jsonl": "9" * 10_000 + "\n",
        "two.jsonl": good.strip() * 2 + "\n",
        "prose.jsonl": STORY,
        "empty.parquet": b"",
        "noise.parquet": noise(chance, 3000),
        "magic.parquet": b"PAR1" + noise(chance, 500) + b"PAR1",
        "cut.parquet": cut(ok, chance),
        "late.parquet": ok[chance.randrange(1, 60) :],
        "text.parquet": STORY,
        "column.parquet": table(folder / "column", {"story": [STORY]}),
        "numbers.parquet": table(folder / "numbers", {"text": [1, 2, 3]}),
        "nulls.parquet": table(folder / "nulls", {"text": pyarrow.array([None, None], pyarrow.string())}),
        "rowless.parquet": table(folder / "rowless", {"text": pyarrow.array([], pyarrow.string())}),
        "story.md": STORY,
        "story": STORY,
        "story.txt.gz": STORY,
    }
    specials = [
        *(("fifo.txt", "fifo"), ("fifo.jsonl", "fifo"), ("fifo.parquet", "fifo"), ("folder.txt", "folder")),
        *(("zero.txt", "/dev/zero"), ("null.jsonl", "/dev/null"), ("random.parquet", "/dev/urandom")),
        *(("loop.txt", "loop"), ("dangling.txt", "nowhere-at-all")),
    ]
    cases: list[tuple[str, bytes | str | None, str]] = [(name, content, "") for name, content in contents.items()]
    cases += [(name, None, how) for name, how in specials]
    chance.shuffle(cases)
    for number, (name, content, how) in enumerate(itertools.islice(itertools.cycle(cases), count)):
        path = folder / str(number) / name

        def prepare(path: Path = path, content: bytes | str | None = content, how: str = how) -> None:
            special(path, how) if content is None else write(path, content)

        # The launcher looks at the beginning of the data; what comes later is seen by all ranks, in their terminals.
        by_launcher = chance.random() < 0.2 and name != "cut.jsonl"
        start = [str(LAB / "launch.sh"), "dp-ga"] if by_launcher else [PYTHON, str(LAB / PRIMER)]
        yield BadInput("data", [[*start, *TINY, "--steps", "200", "--data", str(path)]], (str(path),), prepare)
    validation = write(folder / "short.txt", STORY)
    yield BadInput(
        "data", [[PYTHON, str(LAB / PRIMER), *TINY, "--eval-every", "2", "--data", str(validation)]], (str(validation),)
    )


# Tokenizers


def boundaries(model: bytes) -> list[int]:
    """Where the fields of a protobuf message begin: a message that is cut there is a message."""
    at, starts = 0, []
    while at < len(model):
        starts.append(at)
        at += 1  # the tag; all fields of a SentencePiece model have a length
        length = shift = 0
        while True:
            byte = model[at]
            length |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                break
        at += length
    return starts


def tokenizer_without_end(folder: Path) -> bytes:
    """One that marks no end of a document, which stories are cut at."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([STORY] * 20),
        model_prefix=str(folder / "no-end"),
        vocab_size=40,
        eos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return (folder / "no-end.model").read_bytes()


def tokenizers(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    whole = SHIPPED_MODEL.read_bytes()
    starts = set(boundaries(whole))
    folder.mkdir(parents=True, exist_ok=True)
    no_end = tokenizer_without_end(folder)

    def truncated() -> bytes:
        while (end := chance.randrange(2, len(whole))) in starts:
            pass
        return whole[:end]

    makers: list[tuple[str, Callable[[], bytes | None]]] = [
        ("noise", lambda: noise(chance, 4000)),
        ("cut", truncated),
        ("empty", lambda: b""),
        ("text", STORY.encode),
        ("json", b'{"model": {"type": "BPE"}}'.strip),
        ("cut", truncated),
        ("no-end", lambda: no_end),
        ("folder", lambda: None),
        ("begun", lambda: noise(chance, 100) + whole),
        ("zeros", lambda: bytes(5000)),
    ]
    for number, (name, maker) in enumerate(itertools.islice(itertools.cycle(makers), count - 1)):
        path, content = folder / str(number) / f"{name}.model", maker()

        def prepare(path: Path = path, content: bytes | None = content) -> None:
            special(path, "folder") if content is None else write(path, content)

        script = chance.choice([PRIMER, "hybrid/intro_hybrid.py"]) if name != "no-end" else PRIMER
        wanted = ("--tokenizer",)
        yield BadInput(
            "tokenizers", [command_of(script, ["--data", "sample", "--tokenizer", str(path)])], wanted, prepare
        )
    fifo = folder / "fifo.model"
    yield BadInput(
        "tokenizers",
        [command_of(PRIMER, ["--data", "sample", "--tokenizer", str(fifo)])],
        ("--tokenizer",),
        lambda: special(fifo, "fifo"),
    )


# Checkpoints: copies of a whole one, changed

STEP = Path("checkpoints/step-00000004")
SHARD = "shard-00001-model-00001-of-00001.safetensors"


@functools.cache
def make_run(folder: Path) -> Path:
    """A run with checkpoints."""
    folder.mkdir(parents=True)
    run = folder / "run"
    command = [PYTHON, str(LAB / PRIMER), *TINY, "--save-every", "4", "--keep", "1", "--out", str(run)]
    env = {**os.environ, "PYTHONPATH": str(LAB / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, cwd=folder, stdout=subprocess.DEVNULL)
    return run


def damage(path: Path, how: str, chance: random.Random) -> None:
    """Do to a file what disks, networks and hands do."""
    content = bytearray(path.read_bytes())
    if how == "flip":
        at = chance.randrange(len(content))
        content[at] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del content[chance.randrange(len(content) - 1) :]
    elif how == "empty":
        content.clear()
    elif how == "noise":
        content[:] = noise(chance, len(content) - 2)
    elif how == "longer":
        content += b"\0"
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how != "missing":
        path.write_bytes(content)


def forge(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a record, and make all checksums right again."""
    path = step / "checkpoint.json"
    record = json.loads(path.read_text())
    del record["sha256"]
    change(record)
    for name in record["files"] if isinstance(record.get("files"), dict) else ():
        if isinstance(record["files"][name], dict) and (step / name).is_file():
            content = (step / name).read_bytes()
            record["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    record["sha256"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(record))


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
        return lambda run: (run / STEP / "checkpoint.json").write_text(text) and None

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


# Models that are told from, exported and imported


def exported(folder: Path) -> Path:
    """A model in Hugging Face's format, of a run."""
    run, model = make_run(folder.parent / "whole"), folder / "model"
    env = {**os.environ, "PYTHONPATH": str(LAB / "src"), "OMP_NUM_THREADS": "1"}
    command = [PYTHON, "-m", "simplellm.export", str(run), str(model)]
    subprocess.run(command, check=True, env=env, cwd=folder, stdout=subprocess.DEVNULL)
    return model


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
    whole = exported(folder)
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
        *(damaged("tokenizer.model", how) for how in ("empty", "noise", "folder", "missing")),
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
    run, tell = make_run(folder.parent / "whole"), [PYTHON, str(LAB / "primer/tell_story.py")]
    export = [PYTHON, "-m", "simplellm.export"]
    for command, name in (
        ([*tell, str(folder / "ghost")], "ghost"),
        ([*tell, str(run), "--top-p", chance.choice(["0", "1.5", "nan", "-1"])], "--top-p"),
        ([*tell, str(run), "--temperature", chance.choice(["-1", "nan", "inf", "hot"])], "--temperature"),
        ([*tell, str(run), "--max-tokens", chance.choice(["0", "-3", "many"])], "--max-tokens"),
        ([*tell, str(run), "--prompt", "word " * 200], "--prompt"),
        ([*export, str(run), str(whole)], str(whole)),
        ([*export, str(folder / "ghost"), str(folder / "new")], "ghost"),
        ([*export, str(run), "/dev/null/model"], "/dev/null/model"),
    ):
        yield BadInput("models", [command], (name,))


# Figures, drawn from what is no run


def figures(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    drawn = str(folder / "figure.png")
    contents: dict[str, list[bytes | str]] = {
        "losses metrics.jsonl": ["", "{}", "[1]\n", '{"loss": "low"}', '{"loss": [1]}', noise(chance, 300), "null\n"],
        "timelines trace.json": ["", "{}", "[]", '{"otherData": {}}', noise(chance, 300), "null"],
        "memory trace.json": ['{"otherData": {"ranks": 2}, "traceEvents": []}', "5", noise(chance, 100)],
        "holdings memory.json": ["", "{}", "[]", "[1]", '[{"parameters": "big"}]', noise(chance, 300)],
        "collectives collectives.jsonl": ["", "{}", '{"operation": "sum"}\n', "[]\n", noise(chance, 300)],
    }
    others = [
        [*"losses {} ghost=nowhere --smooth 3".split()],
        [*"losses {} .".split(), "--smooth", chance.choice(["0", "-1", "x"])],
        [*"layout {} --dp".split(), chance.choice(["0", "-2", "x"])],
        [*"layout {} --pp".split(), chance.choice(["0", "-2", "1.5"])],
        [*"topologies {} --world-size".split(), chance.choice(["1", "0", "33", "x"])],
        [*"splits {} --ranks".split(), chance.choice(["1", "99", "two"])],
        ["losses"],
        ["nonsense", "{}"],
        ["layout", "/dev/null/figure.png"],
        ["layout", str(folder / "figure.nonsense")],
    ]
    cases: list[tuple[str, bytes | str | None, list[str]]] = [
        (command.split()[1], content, [command.split()[0], "{}", "{run}"])
        for command, group in contents.items()
        for content in group
    ]
    cases += [("", None, args) for args in others]
    chance.shuffle(cases)
    folder.mkdir(parents=True)
    for number, (name, content, args) in enumerate(itertools.islice(itertools.cycle(cases), count - 4)):
        run = folder / str(number)

        def prepare(run: Path = run, name: str = name, content: bytes | str | None = content) -> None:
            if content is not None:
                write(run / name, content)

        args = [drawn if arg == "{}" else str(run) if arg == "{run}" else arg for arg in args]
        yield BadInput("figures", [[PYTHON, "-m", "distlab.figures", *args]], (), prepare)
    for text in ("nonsense", "dapple --stages 0", "gpipe --micro-batches x", "dapple --png /dev/null/x.png"):
        yield BadInput("figures", [[PYTHON, "-m", "distlab.show_schedule", *text.split()]])


# The launcher, MPI, and ranks that meet


def launcher(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    letters = "abcdefghijklmnopqrstuvwxyz-_./éж"
    script = folder / "no_lab_script.py"
    broken = folder / "broken.py"

    def prepare() -> None:
        write(script, "print('hello')\n")
        write(broken, "DEFAULTS = 5\n")

    cases = [
        ["".join(chance.choices(letters, k=chance.randrange(1, 12))) + "~"],
        ["".join(chance.choices(letters, k=chance.randrange(1, 12))) + "~", "--steps", "3"],
        [""],
        ["-x"],
        ["README.md"],
        ["primer/ghost.py"],
        [str(LAB)],
        [str(script)],
        [str(broken)],
        ["hybrid", "--nnodes", chance.choice(["0", "-1", "two", "1.5"])],
        ["hybrid", "--nnodes", "2"],
        ["hybrid", *"--nnodes 2 --node-rank 2 --master-addr 127.0.0.1".split()],
        ["hybrid", *"--nnodes 2 --node-rank 0".split()],
        ["hybrid", *"--nnodes 4 --node-rank 0 --master-addr 198.51.100.7".split()],
        ["hybrid", *"--nnodes 2 --node-rank 0 --master-addr 198.51.100.7 --ranks-per-node".split(), "3,x"],
        ["hybrid", *"--nnodes 2 --node-rank 0 --master-addr 198.51.100.7 --ranks-per-node".split(), "5,2"],
        ["hybrid", *"--nnodes 2 --node-rank 0 --master-addr 198.51.100.7".split()],
        ["hybrid", *"--nnodes 2 --node-rank 0 --master-addr no.such.host.invalid".split()],
        ["hybrid", "--master-addr", "no.such.host.invalid"],
        ["hybrid", "--max-restarts", chance.choice(["-1", "x", ""])],
        ["hybrid", "3"],
        ["mpi", "--world-size", chance.choice(["0", "-1", "x"])],
    ]
    chance.shuffle(cases)
    for case in itertools.islice(itertools.cycle(cases), count):
        yield BadInput("launcher", [[str(LAB / "launch.sh"), *case]], (), prepare)


def mpi(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    cases = [
        ["--test_case", chance.choice(["nonsense", "", "Allreduce"])],
        ["--seed", chance.choice(["-1", "x", "1.5"])],
        ["--no-such-flag"],
        ["surplus"],
        ["--test_case"],
    ]
    for number, case in enumerate(itertools.islice(itertools.cycle(cases), count)):
        command = [PYTHON, str(LAB / "mpi/mpi-test.py"), *case]
        if number % 2:
            command = [str(LAB / "launch.sh"), "mpi", "--world-size", "2", *case]
        yield BadInput("mpi", [command])


def rendezvous(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    """Ranks that do not fit together, each in a terminal of its own."""

    def rank(script: str, number: int, port: int, *flags: str) -> list[str]:
        both = [*TINY, "--timeout", "8", "--master-port", str(port), *flags]
        return [PYTHON, str(LAB / script), str(number), *both]

    ga, ddp = SCRIPTS["dp-ga"], SCRIPTS["ddp"]
    differing = chance.choice([("--seed", "1"), ("--lr", "0.5"), ("--micro-batches", "1"), ("--steps", "9")])

    def cases() -> Iterator[tuple[list[list[str]], str | tuple[str, ...]]]:
        two = ("--world-size", "2")
        p = free_port()
        other = [*differing] if differing[0] != "--micro-batches" else ["--batch-size", "2"]
        yield [rank(ga, 1, p, *two), rank(ga, 0, p, *two, *other)], other[0]
        p = free_port()
        yield [rank(ga, 1, p, *two), rank(ddp, 0, p, *two)], "the script"
        p = free_port()
        yield [rank(ga, 1, p, "--world-size", "3"), rank(ga, 0, p, *two)], "--world-size"
        p = free_port()
        three = [rank(ga, number, p, "--world-size", "3") for number in (0, 1, 1)]
        yield three, ("rank 1 is taken", "rank 2 to join", "rank 0 to confirm")  # whichever of the two came first
        yield [rank(ga, 1, free_port(), *two, "--timeout", "2")], "rank 0 did not listen"
        yield [rank(ga, 0, free_port(), *two, "--timeout", "2")], "rank 1"
        holder = socket.socket()
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        _held.append(holder)
        p = holder.getsockname()[1]
        yield [rank(ga, 0, p, *two)], f"--master-port {p}"
        yield [[str(LAB / "launch.sh"), "hybrid", *TINY, "--master-port", str(p)]], f"--master-port {p}"
        yield [rank(ga, 1, p, *two, "--timeout", "3")], f"--master-port {p}"
        yield [rank(ga, 0, 80, *two, "--master-addr", "198.51.100.7")], "--master-addr"

    for commands, name in itertools.islice(itertools.cycle(cases()), count):
        yield BadInput("rendezvous", commands, (name,) if isinstance(name, str) else name)


_held: list[socket.socket] = []  # ports in use

KINDS: dict[Callable[[random.Random, int, Path], Iterator[BadInput]], int] = {  # and their shares, in percent
    flags: 30,
    combinations: 12,
    data: 15,
    tokenizers: 5,
    checkpoints: 14,
    models: 10,
    figures: 6,
    launcher: 4,
    mpi: 1,
    rendezvous: 3,
}


def generate(count: int, seed: int, folder: Path) -> list[BadInput]:
    """`count` inputs of all kinds, the same for the same seed; their files are to be in `folder`."""
    shares = {kind: max(1, count * share // 100) for kind, share in KINDS.items()}
    shares[flags] += max(0, count - sum(shares.values()))
    found = []
    for kind, share in shares.items():
        chance = random.Random(f"{seed} {kind.__name__}")
        found += itertools.islice(kind(chance, max(share, 9), folder / kind.__name__), share)
    return found


def run(bad: BadInput, cwd: Path) -> Outcome:
    """Start its commands, wait for their end, and look at the last one's."""
    mark = f"{os.getpid()}-{id(bad)}"
    env = {**os.environ, "PYTHONPATH": str(LAB / "src"), "OMP_NUM_THREADS": "1", "BAD_INPUT": mark}
    bad.prepare()
    started = time.monotonic()
    processes = [
        subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
        )
        for command in bad.commands
    ]
    problems, seconds, sentence = [], 0.0, ""
    deadline = started + 2 * SECONDS  # how long it takes is told, too, where that is too long
    for process in reversed(processes):
        try:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            problems.append("did not end")
        seconds = max(seconds, time.monotonic() - started)
        problems += judge(process.returncode, err, out, bad.names if process is processes[-1] else ())
        if process is processes[-1]:
            sentence = err.strip().splitlines()[-1] if err.strip() else ""
    if seconds > SECONDS:
        problems.append(f"took {seconds:.1f} s")
    left = left_behind(mark)
    if left:
        problems.append(f"left {len(left)} processes behind")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return Outcome(bad, seconds, sentence, problems)


def judge(status: int, err: str, out: str, names: Sequence[str]) -> Iterator[str]:
    """What is wrong with an end."""
    lines = err.splitlines()
    sentences = [line for line in lines if line.startswith("# ")]
    if status == 0:
        yield "exit status 0"
    elif status < 0:
        yield f"ended by signal {-status}"
    if "Traceback" in err + out or any(not line.startswith("# ") for line in lines):
        yield "more than sentences:\n" + err[-1500:]
    elif len(sentences) != 1:
        yield f"{len(sentences)} sentences:\n{err[-1500:]}"
    elif names and not any(name in sentences[0] for name in names):
        yield f"names none of {', '.join(names)}: {sentences[0][:300]}"


def left_behind(mark: str) -> list[int]:
    """Processes with a mark in their environment."""
    for _ in range(20):  # those that end need a moment for it
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"BAD_INPUT={mark}".encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        if not found:
            return []
        time.sleep(0.1)
    return found


def shown(command: Sequence[str]) -> str:
    """A command as one would type it, the longest arguments cut."""
    words = (word if len(word) < 200 else f"{word[:20]}...({len(word)} characters)" for word in command)
    return shlex.join(word.replace(f"{LAB}/", "").replace(PYTHON, "python") for word in words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="inputs that are tried at a time")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of inputs, from 0")
    parser.add_argument("--kind", choices=[kind.__name__ for kind in KINDS])
    parser.add_argument("--keep", type=Path, help="an empty folder for the files, which stay")
    parser.add_argument("--show", action="store_true", help="print each sentence")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cwd = folder / "work"
        cwd.mkdir(parents=True)
        numbered = [
            (number, bad)
            for number, bad in enumerate(generate(args.count, args.seed, folder.absolute()))
            if (args.only is None or number in args.only) and args.kind in (None, bad.kind)
        ]
        outcomes: list[Outcome] = []
        with ThreadPoolExecutor(args.jobs) as pool:
            tried = pool.map(lambda pair: run(pair[1], cwd), numbered)
            for (number, _), outcome in zip(each(numbered, "inputs"), tried, strict=True):
                outcomes.append(outcome)
                if args.show or outcome.problems:
                    verdict = "FAILED" if outcome.problems else "ok"
                    print(f"{number} {outcome.bad.kind} {verdict} {outcome.seconds:.1f} s: {outcome.sentence[:400]}")
                if outcome.problems:
                    print("   ", *(shown(command) for command in outcome.bad.commands), sep="\n    $ ")
                    print("    " + "\n".join(outcome.problems).replace("\n", "\n    "), flush=True)
    summarize(outcomes)
    return any(outcome.problems for outcome in outcomes)


def summarize(outcomes: Sequence[Outcome]) -> None:
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.bad.kind].append(outcome)
    print(f"{'kind':<14}{'inputs':>8}{'one sentence':>14}{'median s':>10}{'worst s':>9}")
    for kind, group in [*by_kind.items(), ("all", list(outcomes))]:
        seconds = sorted(outcome.seconds for outcome in group)
        good = sum(not outcome.problems for outcome in group)
        print(f"{kind:<14}{len(group):>8}{good:>14}{seconds[len(seconds) // 2]:>10.1f}{seconds[-1]:>9.1f}")


if __name__ == "__main__":
    sys.exit(main())
