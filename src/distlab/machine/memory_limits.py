"""The memory that this process may use, and the processes that the system has killed for theirs.

Without torch, because a plan also needs them.
"""

import contextlib
import os
from pathlib import Path

from distlab.machine.cores import groups_of

KILLS = Path("/proc/vmstat")


def memory_bytes() -> float:
    """Return the memory of this machine, or its groups' lowest limit."""
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for file in (folder / name for folder in groups_of("memory") for name in ("memory.max", "memory.limit_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
            limits.append(float(int(file.read_text())))
    return min(limits)


def memory_kills() -> int:
    """Return how many processes of this group, or of this machine, the system has killed for memory; 0 if unknown."""
    names = "memory.events", "memory.oom_control"  # of version 2 and 1
    for file in [*(folder / name for folder in groups_of("memory") for name in names), KILLS]:
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in file.read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0
