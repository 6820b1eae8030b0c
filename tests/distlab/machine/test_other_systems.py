"""Runs where the system lacks what only Linux has, as on macOS: they use gloo, and compute the same."""

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chapters import BATCH, LAYOUTS, STEPS, OneProcess, State, assert_equal, train
from support.processes import free_port, run_ranks

ONLY_ON_LINUX = {
    os: "memfd_create sched_getaffinity sched_setaffinity sched_getscheduler sched_setscheduler SCHED_BATCH".split(),
    mmap: ["MADV_HUGEPAGE"],
}


def not_in_proc(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).startswith(("/proc", "/dev/fd")):  # on Linux, the second is a link into the first
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return call(path, *args, **options)

    return called


def train_elsewhere(rank: int, script: str, flags: list[str]) -> State:
    """Return the weights of a rank without shared memory, huge pages, the C library's own calls, and /proc."""
    for module, names in ONLY_ON_LINUX.items():
        for name in names:
            delattr(module, name)
    for name in ("open", "listdir", "readlink"):
        setattr(os, name, not_in_proc(getattr(os, name)))
    load = ctypes.CDLL
    ctypes.CDLL = lambda name, *args: object() if name in (None, "libc.so.6") else load(name, *args)  # type: ignore
    return train(rank, script, flags)[0]


@pytest.mark.parametrize("name", ["dp-ga", "pp-dapple"])
def test_a_run_without_what_only_linux_has_is_the_run_of_one_process(
    name: str, one_process: OneProcess, tmp_path: Path
) -> None:
    ranks, script, flags = LAYOUTS[name]
    flags = f"{flags} --steps {STEPS} --out {tmp_path} --master-port {free_port()}"
    held: State = {}
    for own in run_ranks(ranks, train_elsewhere, script, flags.split()):
        held |= own
    assert_equal(held, one_process(BATCH)[0])
