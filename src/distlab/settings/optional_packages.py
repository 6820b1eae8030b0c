"""The packages beside the lab that subcommands, and two flags of a run, need: `--machine` and `--page`."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from simplellm.errors import InputError, require_package


def import_optional(module: str, what: str) -> ModuleType:
    """Import a module of a package beside the lab, for `what`; `InputError` if it, or one that it needs, is absent."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = error.name or ""
        if not package.startswith("distlab_") or "." in package:
            raise
        raise InputError(f"{what} needs the package {package}, which is not installed beside distlab") from None


def planner_prediction() -> Any:
    """Return the planner's class `Prediction`; `InputError` without the planner, which nothing else here needs."""
    return import_optional("distlab_planner.prediction", "--machine").Prediction


def page_writer() -> Callable[..., Path]:
    """Return the function that writes a run's page; `InputError` if its package or plotly is not installed."""
    require_package("plotly", "--page")
    write: Callable[..., Path] = import_optional("distlab_page", "--page").write
    return write
