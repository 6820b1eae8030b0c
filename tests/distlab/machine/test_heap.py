"""The heap of a rank, in processes of their own: page faults, huge pages, and what is not allowed."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from distlab.machine.heap import HEAP_VARIABLES, OVERCOMMIT

IS_STRICT = OVERCOMMIT.exists() and OVERCOMMIT.read_text().strip() == "2"
reserves = pytest.mark.skipif(IS_STRICT, reason="the system counts reserved memory as used")
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
START = """
import re, resource, threading, time
from pathlib import Path
from distlab.machine import heap
threading.Thread(target=time.sleep, args=[60], daemon=True).start()  # with a second thread, glibc has several heaps
def megabytes(name):
    return int(re.search(rf"{name}:\\s*([0-9]+) kB", Path("/proc/self/status").read_text())[1]) >> 10
def requests_huge_pages():
    flags = re.findall(r"\\[heap\\].*?VmFlags:([^\\n]*)", Path("/proc/self/smaps").read_text(), re.S)
    return any("hg" in part.split() for part in flags)
before = megabytes("VmSize")
"""
FAULTS = """
def step(megabytes):
    activations = [bytearray(megabytes << 20) for _ in range(200 // megabytes)]
def so_far():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
faults = 0
for megabytes in (1, 29, 85):
    for _ in range(2):
        step(megabytes)
    start = so_far()
    for _ in range(2):
        step(megabytes)
    faults += so_far() - start
"""
SET_UP = "heap.set_up_heap()"


@pytest.fixture(autouse=True)
def the_environment_sets_up_no_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*HEAP_VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


def value(expression: str, *after: str) -> int:
    """The value of an expression in a new process, after some lines of code."""
    code = "\n".join([START, *after, f"print(int({expression}))"])
    return int(subprocess.check_output([sys.executable, "-c", code], timeout=60))


def test_freed_memory_is_used_again_without_page_faults() -> None:
    """Also where the process may not reserve what it asks for."""
    without = value("faults", FAULTS)
    if without < 50:
        pytest.skip("this system returns no memory, or gives it in huge pages")
    for limit in ("", "AS", "DATA"):
        limited = f"resource.setrlimit(resource.RLIMIT_{limit}, ((before + 500) << 20, -1))" if limit else ""
        assert value("faults", limited, SET_UP, FAULTS) < without / 10, limit


@reserves
def test_the_heap_requests_huge_pages() -> None:
    grow = "blocks = [bytearray(1 << 20) for _ in range(50)]"
    assert [value("requests_huge_pages()", set_up, grow) for set_up in ("", SET_UP)] == [0, 1]


@reserves
def test_reserved_memory_is_not_used() -> None:
    use = "block = bytearray(25 << 20)"
    assert value("megabytes('VmSize') - before", SET_UP, use) > 500, "nothing is reserved"
    assert 25 <= value("megabytes('VmRSS') - used", "used = megabytes('VmRSS')", SET_UP, use) < 40


def test_nothing_is_reserved_where_the_system_counts_it_as_used(tmp_path: Path) -> None:
    (tmp_path / "overcommit_memory").write_text("2\n")
    strict = f"heap.OVERCOMMIT = Path({str(tmp_path)!r}, 'overcommit_memory')"
    assert value("megabytes('VmSize') - before", strict, SET_UP) < 40


@pytest.mark.parametrize("variable", ["MALLOC_PERTURB_=1", "GLIBC_TUNABLES=glibc.malloc.top_pad=131072"])
def test_a_heap_that_the_environment_sets_up_is_left_alone(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*variable.split("=", 1))
    assert value("megabytes('VmSize') - before", SET_UP) < 40


@reserves
def test_other_tunables_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
    assert value("megabytes('VmSize') - before", SET_UP) > 500
