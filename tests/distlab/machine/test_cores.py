"""Limits of control groups, in files as Linux has them in version 1 and 2."""

import math
from pathlib import Path

import pytest

from distlab.machine import memory_limits
from distlab.machine.cores import asked_threads, cores, cpu_quota

pytestmark = pytest.mark.quick
V1_ROOT = {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("distlab.machine.cores.GROUPS", tmp_path / "groups")
    monkeypatch.setattr("distlab.machine.cores.OWN", tmp_path / "own")
    monkeypatch.setattr(memory_limits, "KILLS", tmp_path / "vmstat")
    return tmp_path


def write(folder: Path, own: str, files: dict[str, str]) -> None:
    (folder / "own").write_text(own)
    for name, content in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "200000 100000"}, 2),
        ("0::/\n", {"cpu.max": "max 100000"}, math.inf),
        ("0::/\n", {}, math.inf),
        ("0::/a/b/c\n", {"cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/c/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "50000 20000"}, 2.5),
        ("0::/docker/of-the-host\n", {"cpu.max": "300000 100000"}, 3),  # a container sees its own group as the root
        ("0::/../elsewhere\n", {"cpu.max": "100000 100000"}, 1),
        (
            "2:cpu,cpuacct:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("1:cpu:/a\n", {**V1_ROOT, "cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"}, 4),
        ("1:cpu:/a\n0::/\n", V1_ROOT, math.inf),
        ("9:cpuset:/\n1:name=systemd:/\n0::/s\n", {"unified/s/cpu.max": "100000 50000"}, 2),
    ],
)
def test_the_least_quota_of_all_groups_counts(own: str, files: dict[str, str], quota: float, groups: Path) -> None:
    write(groups, own, files)
    assert cpu_quota() == quota


@pytest.mark.parametrize(("quota", "expected"), [("20000", 1), ("190000", 1), ("300000", 3), ("9900000", 8)])
def test_cores_are_at_most_those_of_the_quota(
    quota: str, expected: int, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64 if process else 8)), raising=False)
    assert cores() == 8, "without any group"
    write(groups, "0::/\n", {"cpu.max": f"{quota} 100000"})
    assert cores() == expected


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {}, 4096 * 1000),
        ("0::/a\n", {"memory.max": "3000000", "a/memory.max": "max"}, 3_000_000),
        ("0::/a\n", {"memory.max": "3000000", "a/memory.max": "2000000"}, 2_000_000),
        ("4:memory:/a\n", {"memory/memory.limit_in_bytes": "9" * 18, "memory/a/memory.limit_in_bytes": "1000"}, 1000),
    ],
)
def test_memory_is_at_most_that_of_all_groups(
    own: str, files: dict[str, str], expected: int, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    write(groups, own, files)
    assert memory_limits.memory_bytes() == expected


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/a\n", {"a/memory.events": "low 0\noom 4\noom_kill 3"}),
        ("4:memory:/a\n", {"memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3"}),
        ("0::/\n", {"../vmstat": "nr_free_pages 7\noom_kill 3"}),
    ],
)
def test_what_was_killed_for_memory_is_counted(own: str, files: dict[str, str], groups: Path) -> None:
    assert memory_limits.memory_kills() == 0
    write(groups, own, files)
    assert memory_limits.memory_kills() == 3


@pytest.mark.parametrize(
    ("text", "threads"), [("3", 3), ("4,2", 4), (" 2 , 1", 2), ("", None), ("0", None), ("x", None)]
)
def test_the_first_of_the_threads_that_are_asked_for_counts(
    text: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert asked_threads() == threads
