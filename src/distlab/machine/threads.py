"""The number of threads that a user requests, and of cores; without torch, because a plan also needs them."""

import os

from distlab.machine.cgroups import cpu_quota

# Variables with which OpenMP binds the threads of a process to cores, from the first core on.
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def asked_threads() -> int | None:
    """Return the threads of every rank by OMP_NUM_THREADS; None if that is not set, or not a number from 1 up.

    In a list, which is for nested levels of threads, the first number counts.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) > 0 else None


def cores() -> int:
    """Return the cores of this host that this process may use, subject to a container's quota of time."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(there, cpu_quota())))


def binding() -> list[str]:
    """Return the variables that are set and bind threads, as in "OMP_PROC_BIND=true"."""
    return [f"{name}={os.environ[name]}" for name in BINDING if os.environ.get(name, "false").lower() != "false"]
