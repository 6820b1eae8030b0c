"""What an input is, and the commands that take one."""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.launch import TOPOLOGIES
from support import chapters
from support.processes import LAB

PYTHON = sys.executable
PRIMER = "primer/intro.py"
TINY = "--device cpu --data sample --dmodel 16 --num-heads 2 --n-layers 2 --seq-len 16 --batch-size 1 --steps 4".split()
OTHERS = "mpi", "hello", "pp-gpipe", "quickstart"  # without settings of the lab's, or with flags that choose a schedule
SCRIPTS = {name: command.split()[0] for name, command in TOPOLOGIES.items() if name not in OTHERS}  # by the topology


@dataclass
class BadInput:
    """An input that cannot work.

    Attributes:
        kind: which generator made it.
        commands: that are started together; the last one is looked at, the others have to end too.
        names: the sentence has to contain one of them.
        prepare: makes its files.
        as_nobody: whether a user without rights is to try it.
    """

    kind: str
    commands: list[list[str]]
    names: Sequence[str] = ()
    prepare: Callable[[], object] = lambda: None
    as_nobody: bool = False


@functools.cache
def defaults_of(script: str) -> Any:
    """A script's own settings."""
    sys.path.insert(0, str((LAB / script).parent))  # some have modules beside them
    return chapters.load(script).DEFAULTS


def command_of(script: str, flags: Sequence[str]) -> list[str]:
    """A script in a terminal of its own."""
    return [PYTHON, str(LAB / script), *(["0"] if defaults_of(script).layout else []), *flags]
