"""Runs the modules of TP/sentiment in forked ranks, for their names are short, and others have them too."""

import functools
import importlib
import re
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from support.processes import LAB, free_port, process_group, run_ranks

P = ParamSpec("P")
T = TypeVar("T")
SLICED_BY_ROWS = re.compile(r"(\.|^)(q|k|v|first_linear)\.weight")
SLICED_BY_COLUMNS = re.compile(r"(\.|^)(output|second_linear)\.weight|embedding\.weight")


def load(name: str) -> Any:
    """A module of TP/sentiment. Only forked ranks call this."""
    sys.path.insert(0, str(LAB / "TP" / "sentiment"))
    return importlib.import_module(name)


def in_a_fork(work: Callable[P, T]) -> Callable[P, T]:
    """Make a test, or a part of one, run in a forked rank of its own."""

    @functools.wraps(work)
    def run(*args: P.args, **options: P.kwargs) -> T:
        result: T = run_ranks(1, lambda _: work(*args, **options))[0]
        return result

    return run


def on_ranks(world_size: int, tp: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(*args)` on each rank, seeded differently, after `pcomm.init(tp)`."""
    port = free_port()

    def rank_work(rank: int) -> Any:
        with process_group(rank, world_size, port):
            load("pcomm").init(tp)
            return work(*args)

    return run_ranks(world_size, rank_work)


def split_dim(name: str) -> int | None:
    """Along which dimension one of the twin's weights is split; None for a norm's gain, which every rank has."""
    return 0 if SLICED_BY_ROWS.search(name) else 1 if SLICED_BY_COLUMNS.search(name) else None
