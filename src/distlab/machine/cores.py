"""The cores and threads that this process may use: by variables, or by Linux's control groups.

Without torch, because a plan also needs them.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

from simplellm.errors import require

# The limits of the container or service that this process is in, of either version.
GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")  # lines of an ID, controllers ("" in version 2), and a path below those of GROUPS
# Variables with which OpenMP binds the threads of a process to cores, from the first core on.
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
MOST_THREADS = 1024  # of a rank; a larger number is taken for a typing error


def asked_threads() -> int | None:
    """Return the threads of every rank by OMP_NUM_THREADS; None if that is not set, or not a number from 1 up.

    In a list, which is for nested levels of threads, the first number counts.

    Raises:
        InputError: the number is so large that OpenMP would use up all memory.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not asked.isdecimal() or int(asked) == 0:
        return None
    require(int(asked) <= MOST_THREADS, f"OMP_NUM_THREADS={asked}: give at most {MOST_THREADS:,} threads for each rank")
    return int(asked)


def cores() -> int:
    """Return the cores of this host that this process may use, subject to a container's quota of time."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(there, cpu_quota())))


def binding() -> list[str]:
    """Return the variables that are set and bind threads, as in "OMP_PROC_BIND=true"."""
    return [f"{name}={os.environ[name]}" for name in BINDING if os.environ.get(name, "false").lower() != "false"]


def cpu_quota() -> float:
    """Return the cores' worth of time that this process may use, its groups' lowest limit; infinite without one."""
    return min(map(_quota_of, groups_of("cpu")), default=math.inf)


def groups_of(controller: str) -> Iterator[Path]:
    """Yield the groups of this process for a controller, from the innermost to the outermost that is visible.

    In a container the path may be the host's: then only its end, or no part of it, exists below the mount.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = OWN.read_text().splitlines()
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        inside = Path(path.lstrip("/"))
        for mount in (GROUPS / controller, GROUPS / names) if names else (GROUPS, GROUPS / "unified"):
            yield from (mount / part for part in (inside, *inside.parents) if ".." not in part.parts)


def _quota_of(folder: Path) -> float:
    """Return the cores that one group's files allow: `cpu.max` ("150000 100000" or "max 100000"), or version 1's."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # ValueError: "max"
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if int(quota) > 0:  # -1 is no limit
                return int(quota) / int(period)
    return math.inf
