"""A process's standard streams, which may be closed, read-only, or in an old encoding."""

import contextlib
import fcntl
import os
import sys


def open_streams() -> None:
    """Make the standard streams usable; call it at the start of every program.

    A stream that is closed, or cannot be written to, becomes /dev/null: otherwise the next file that this process opens
    would get its number, and the output of C libraries would go into it. A character that the output's encoding lacks
    is printed as an escape sequence, so that a quotation mark in a story does not end a run.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        is_output = number > 0
        try:
            is_usable = not is_output or fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            os.fstat(number)
        except OSError:
            is_usable = False
        if not is_usable:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if is_output else "r", closefd=False))
            setattr(sys, f"__{name}__", getattr(sys, name))
        if is_output:
            with contextlib.suppress(AttributeError, ValueError):  # tests and notebooks put other objects there
                getattr(sys, name).reconfigure(errors="backslashreplace")
