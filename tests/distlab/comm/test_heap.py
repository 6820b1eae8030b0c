"""The heap of a rank, in processes of their own: page faults, huge pages, and what is not allowed."""

import subprocess
import sys
from pathlib import Path

import pytest

from distlab.comm.heap import SETTINGS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MEGABYTES = """
import re, resource
from pathlib import Path
from distlab.comm import heap
def megabytes(name, file="status"):
    return int(re.search(rf"{name}:\\s*([0-9]+) kB", Path("/proc/self", file).read_text())[1]) >> 10
"""
PAGE_FAULTS = """
def step(megabytes):
    activations = [bytearray(megabytes << 20) for _ in range(200 // megabytes)]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
taken = 0
for megabytes in range(1, 100, 14):
    for _ in range(5):
        step(megabytes)
    before = faults()
    for _ in range(2):
        step(megabytes)
    taken += faults() - before
"""
BLOCK = "block = bytearray(25 << 20)"  # all of it is written to


@pytest.fixture(autouse=True)
def the_environment_sets_up_no_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


def value(expression: str, *after: str) -> int:
    """The value of an expression in a new process, after some lines of code."""
    code = "\n".join([MEGABYTES, *after, f"print({expression})"])
    return int(subprocess.check_output([sys.executable, "-c", code], timeout=60))


@pytest.mark.quick
def test_freed_memory_is_used_again_without_page_faults() -> None:
    without, kept = value("taken", PAGE_FAULTS), value("taken", "heap.set_up_heap()", PAGE_FAULTS)
    if without < 50:
        pytest.skip("this system returns no memory, or gives it in huge pages")
    assert kept < without / 10


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text(), reason="no huge pages on request"
)
@pytest.mark.parametrize(("set_up", "at_least", "at_most"), [("", 0, 0), ("heap.set_up_heap()", 90, 130)])
def test_small_and_large_blocks_lie_in_huge_pages(set_up: str, at_least: int, at_most: int) -> None:
    blocks = "small, large = [bytearray(1 << 20) for _ in range(50)], bytearray(50 << 20)"
    assert at_least <= value("megabytes('AnonHugePages', 'smaps_rollup')", set_up, blocks) <= at_most


@pytest.mark.parametrize(("name", "at_least", "at_most"), [("VmHWM", 25, 40), ("VmSize", 500, 20_000)])
def test_reserved_memory_is_not_used(name: str, at_least: int, at_most: int) -> None:
    grown = value(f"megabytes('{name}') - before", f"before = megabytes('{name}')", "heap.set_up_heap()", BLOCK)
    assert at_least <= grown <= at_most


def test_nothing_is_reserved_where_the_system_counts_it_as_used(tmp_path: Path) -> None:
    (tmp_path / "overcommit_memory").write_text("2\n")
    strict = f"heap.OVERCOMMIT = Path({str(tmp_path)!r}, 'overcommit_memory')"
    before = "before = megabytes('VmSize')"
    assert value("megabytes('VmSize') - before", strict, before, "heap.set_up_heap()", BLOCK) < 40


def test_a_process_that_may_not_reserve_goes_on() -> None:
    limit = "most = (megabytes('VmSize') + 200) << 20; resource.setrlimit(resource.RLIMIT_AS, (most, most))"
    assert value("len(block) >> 20", limit, "heap.set_up_heap()", BLOCK) == 25


def test_a_heap_that_the_environment_sets_up_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "100000")
    assert value("megabytes('VmSize') - before", "before = megabytes('VmSize')", "heap.set_up_heap()", BLOCK) < 40
