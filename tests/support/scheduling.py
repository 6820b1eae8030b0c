"""The order in which pytest's workers run the tests: each file by one of them; last, one by one, those that are alone.

So the workers share one start, and no test that measures time, kills at a moment or fills the machine meets others.
"""

import contextlib
import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

LOCK = "LAB_TESTS_LOCK"  # environment variable: the file that the workers of a session lock
# Files test_… whose few tests take long, in the order in which they come first: those that wait for processes beside
# those that compute. Then come those with most tests, so that all workers end together.
LONG = (
    "failures compiling layouts repair museum mpi_chapter step bad_input surroundings over_nccl playground resume "
    "faults environment executor sent_bytes page page_in_a_browser long_work hybrid_repair intro hosts restarts "
    "wheel ranks lessons programs hello sentiment deadlock follow commands"
).split()
PAGES = "tests/distlab_page/"  # files that one worker runs, which makes the runs of their conftest.py once


class InOrder(LoadScopeScheduling):
    """Hands out files in the order of `put_in_order`; last, all tests that are alone to one worker."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def schedule(self) -> None:
        self._alone = set(list_of_alone().read_text().splitlines())
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        if nodeid in self._alone:
            return "alone"
        return PAGES if nodeid.startswith(PAGES) else nodeid.partition("::")[0]


def list_of_alone() -> Path:
    """The file in which each worker names the tests that are alone, as the scheduler sees no marks.

    (With pytest 9.2, the groups of xdist 3.8 are silently ignored: it looks for them in attributes that are gone.)
    """
    return Path(os.environ[LOCK] + ".alone")


def is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def put_in_order(items: list[pytest.Item]) -> None:
    of_file = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[bool, int, int, Path]:
        name = item.path.stem.removeprefix("test_")
        return is_alone(item), LONG.index(name) if name in LONG else len(LONG), -of_file[item.path], item.path

    items.sort(key=place)
    list_of_alone().write_text("\n".join(item.nodeid for item in filter(is_alone, items)))


@contextlib.contextmanager
def beside_others(item: pytest.Item) -> Iterator[None]:
    """Run a test inside; one that has to be alone begins when no other runs, and none begins before its end."""
    with open(os.environ[LOCK], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if is_alone(item) else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also for processes that the test has left behind
