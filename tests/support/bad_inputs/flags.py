"""Values that a flag cannot have.

The flags and their types are read from the scripts' settings, so that a new flag is covered.
"""

import dataclasses
import random
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from distlab.settings.common import RunSettings
from support.bad_inputs.files import OVERLONG
from support.bad_inputs.inputs import PYTHON, SCRIPTS, BadInput, command_of, defaults_of
from support.processes import LAB

MAY_BE_ZERO = {
    *("seed", "dropout", "betas", "weight_decay", "warmup_steps", "min_lr"),
    *("merge_alpha", "outer_momentum", "overlap_steps"),
    *("experts", "capacity", "balance_rate"),
}
MAY_BE_NEGATIVE = {"seed"}
MAY_BE_HUGE = {"lr", "outer_lr", "weight_decay", "clip_norm", "capacity"}  # no number as a loss, or no limit
TOO_LARGE = {"dropout": "1", "betas": "1", "outer_momentum": "1", "merge_alpha": "1", "balance_rate": "1.1"}
BAD_TEXT = {
    "data": ["nothing-there.txt", "ghost.parquet", "/", ".", "a.docx", "", OVERLONG + ".txt", "/dev/null", "здесь.txt"],
    "schedule": ["", "GPIPE", "1f1b1b", "нет"],
    "keep_at_most": ["", "x", "0", "0.5", "-1", "6 MB", "6TB", "0MB", "1e3", "inf", "6"],
    "layers_per_stage": ["", "a,b", "99,1,1", "1,2", "-1,4,3", "6", "2,2,2,", "0,0,0"],
    "shapes": ["", "2x2", "0x4x4", "axbxc", "4x4x4x4", "4x4x-4", "4*4*4", "99999999999999999999x1x1"],
    "master_addr": ["no.such.host.invalid", "256.1.1.1", "a b", "ж" * 80, "198.51.100.7"],
}
BAD_PATHS = {
    "out": ["/dev/null", "/dev/null/run", OVERLONG],
    "tokenizer": ["nothing-there.model", "/", "/dev/null", "", OVERLONG, str(LAB / "README.md")],
    "machine": ["nothing-there.json", "/", "/dev/null", "", OVERLONG, str(LAB / "README.md")],
    "record_routes": ["routes"],  # without experts
    "replay_routes": ["routes"],
    "resume": ["nothing-there", "/dev/null", "/", OVERLONG, str(LAB / "README.md")],
}
ONE_PROCESS_IGNORES = {"master_addr"}
LATER = {"master_addr"}  # not looked at before the ranks meet


def fields_of(settings: RunSettings) -> dict[str, Any]:
    """The flags of a script and their types, without the rank."""
    hints = typing.get_type_hints(type(settings))
    return {flag.name: hints[flag.name] for flag in dataclasses.fields(settings) if flag.name != "rank"}


def bad_values(name: str, kind: Any) -> list[list[str]]:
    """What a flag cannot be, as the arguments that follow it."""
    alternatives = [part for part in typing.get_args(kind) if part is not type(None)]
    if typing.get_origin(kind) is Literal:
        return [[value] for value in ("", "nonsense", str(alternatives[0]).upper() + "x", "ü", "0")]
    if typing.get_origin(kind) is tuple:
        return [value * len(alternatives) for value in bad_values(name, alternatives[0])] + [["0.5"]]
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
        values += [] if name in MAY_BE_NEGATIVE else ["-1"]
        values += [] if name in MAY_BE_HUGE else [f"1{'0' * 30}"]
        values += [TOO_LARGE[name]] if name in TOO_LARGE else []
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
