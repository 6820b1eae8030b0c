"""Names of messages and collectives, for the output and for the ledger.

A `dist.all_reduce` of a script is named after its operation and the line of the script. The library knows more: inside
`with named("the gradients of bucket 2", kind="gradients"):` the operation has this name, and this column in the ledger.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import NamedTuple

import torch

from distlab.comm.context import context_of

CONTROL = "control"  # the ledger's column for messages that are not part of training


class Name(NamedTuple):
    """The name of a message or collective, and its column in the ledger."""

    what: str
    kind: str


_name: ContextVar[Name | None] = ContextVar("name", default=None)
# Code between a script and here: torch, the lab, and modules whose decorators torch and the lab use.
FOLDERS = "<", os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))
MODULES = {*sys.stdlib_module_names, "typing_extensions"}


@contextlib.contextmanager
def named(what: str, kind: str) -> Iterator[None]:
    """Name the messages and collectives inside `what`, and count them in the column `kind`."""
    token = _name.set(Name(what, kind))
    try:
        yield
    finally:
        _name.reset(token)


@contextlib.contextmanager
def counted_as(kind: str) -> Iterator[None]:
    """Count everything that the run sends inside in the column `kind`, whatever its name, also from other threads.

    autograd runs a GPU's backward passes in a separate thread, which does not have this thread's context variables.
    """
    context = context_of()
    outer, context.counted_as = context.counted_as, kind
    try:
        yield
    finally:
        context.counted_as = outer


def name_of(operation: str) -> tuple[str, str, str]:
    """Return the name, column and calling line of an operation that starts here; no line if the library names it."""
    name = _name.get()
    if name is None:
        return operation, operation, line_of_script()
    return name.what, name.kind, ""


def line_of_script() -> str:
    """Return the calling line outside of torch and the lab, such as "intro_PP_1F1B.py line 57"; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_of_library(frame.f_code.co_filename, frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)} line {frame.f_lineno}"


@functools.cache  # every message asks for some frames
def _is_of_library(file: str, module: str) -> bool:
    return file.startswith(FOLDERS) or module.partition(".")[0] in MODULES
