"""The number of threads that a user asks for; without torch, for a plan needs it too."""

import os


def asked_threads() -> int | None:
    """The threads of every rank by OMP_NUM_THREADS; None if that is not set, or is no number from 1 up."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else None
