"""Calls of the operating system that fail, for tests of what is done without what they would have given."""

import os
from collections.abc import Callable
from typing import Any


def refuse(error: int) -> Callable[..., Any]:
    """A function that raises the `OSError` of this number, in place of a system call."""

    def raise_error(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    return raise_error
