"""The number of threads that a user asks for, and the cores there are; without torch, for a plan needs them too."""

import os

from distlab.comm.cgroups import cpu_quota

# Variables with which OpenMP binds the threads of a process to cores, from the first core on.
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def asked_threads() -> int | None:
    """The threads of every rank by OMP_NUM_THREADS; None if that is not set, or is no number from 1 up.

    Of a list, which is of nested levels of threads, the first counts.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) > 0 else None


def cores() -> int:
    """Cores of this host that this process may use, a container's quota of time included."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(there, cpu_quota())))


def binding() -> list[str]:
    """The variables that are set, as in "OMP_PROC_BIND=true", and bind threads."""
    return [f"{name}={os.environ[name]}" for name in BINDING if os.environ.get(name, "false").lower() != "false"]
