"""The two packages beside the lab that flags of a run need: the planner for `--machine`, the page for `--page`."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simplellm.errors import InputError, require_package


def planner_prediction() -> Any:
    """Return the planner's class `Prediction`; `InputError` without the planner, which nothing else here needs."""
    try:
        return importlib.import_module("distlab_planner.prediction").Prediction
    except ModuleNotFoundError as error:
        if error.name != "distlab_planner":
            raise
        raise InputError("--machine needs the package distlab_planner, which is not installed") from None


def page_writer() -> Callable[..., Path]:
    """Return the function that writes a run's page; `InputError` if its package or plotly is not installed."""
    require_package("plotly", "--page")
    try:
        write: Callable[..., Path] = importlib.import_module("distlab_page").write
        return write
    except ModuleNotFoundError:
        raise InputError("--page needs the package distlab_page, which is not installed") from None
