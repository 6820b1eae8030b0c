"""The apps of the playground, run as plain programs, without a browser."""

import functools
import runpy
from importlib.util import find_spec
from typing import Any

import pytest

from distlab_playground.command import NOTEBOOKS

MARIMO = pytest.mark.skipif(
    find_spec("marimo") is None, reason="needs marimo: pip install -r requirements-playground.txt"
)


@functools.cache
def _loaded(name: str) -> Any:
    return runpy.run_path(str(NOTEBOOKS / f"{name}.py"))["app"]


def outputs(name: str, guess: object, **given: Any) -> tuple[str, Any]:
    """Run an app with a guess locked, or None; return what it shows, and the values of its variables.

    The given variables replace the cells that define them.
    """
    outputs, values = _loaded(name).run(defs={"locked": lambda: guess, "lock": None, **given})
    return " ".join(output.text for output in outputs if hasattr(output, "text")), values
