"""The records of runs, as figures need them."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from distlab.reports import METRICS
from distlab.reports.records import newest_run, read_steps
from distlab.reports.trace import Trace, read_chrome
from simplellm.errors import InputError, require

Against = Literal["steps", "tokens", "seconds"]


def named_runs(runs: list[str]) -> list[tuple[str, Path]]:
    """Return the name and folder of each run, from "NAME=RUN", or from a folder, whose name the run then has.

    If several folders have the same name, their paths are the names. Raises `InputError` if there is no run.
    """
    require(bool(runs), "give one or more runs, each as NAME=RUN with a run's folder")
    pairs: list[tuple[str, Path]] = []
    for run in runs:
        name, equals, folder = run.partition("=")
        is_named = equals and not Path(run).exists()  # a folder's name may contain "="
        pairs.append((name, Path(folder)) if is_named else ("", Path(run)))
    pairs = [(name, newest_run(path)) for name, path in pairs]
    uses = Counter(path.name for name, path in pairs if not name)
    return [(name or (path.name if uses[path.name] == 1 else str(path)), path) for name, path in pairs]


def named_traces(runs: list[str]) -> list[tuple[str, Trace]]:
    """Return the name and trace of each run; `InputError` if one has no trace, or none of a step."""
    return [(name, _read_trace(run)) for name, run in named_runs(runs)]


def _read_trace(run: Path) -> Trace:
    path = run / "trace.json" if run.is_dir() else run
    trace = read_chrome(path)
    require(bool(trace.steps()), f"{path}: no step came after the last repair, so there is none to draw")
    return trace


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run, one per step; `InputError` if they cannot be read."""
    path, give = run / METRICS, "give NAME=RUN with a run's folder"
    require(path.exists(), f"{path}: there is no such file; {give}")
    records = read_steps(run, "step", "loss")
    try:
        for record in records:
            for name in {"loss", "validation_loss"} & record.keys():
                record[name] = math.nan if record[name] is None else float(record[name])
        require(bool(records), "no step has been recorded")
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: these are not the metrics of a run; {give}") from error
    return records


def places(records: list[dict[str, Any]], against: Against, run: Path) -> list[float]:
    """Return the position of each record on the x axis, after its step; `InputError` if the records do not have it."""
    if against == "steps":
        return [1 + step for step in column(records, "step", "--against", run)]
    values = column(records, against, "--against", run)
    return list(itertools.accumulate(values)) if against == "seconds" else values


def column(records: list[dict[str, Any]], name: str, flag: str, run: Path) -> list[float]:
    """Return one value of each record; `InputError` if the records do not have it."""
    try:
        return [float(record[name]) for record in records]
    except (KeyError, TypeError, ValueError) as error:
        needed = "; the run needs --clip-norm" if name == "grad_norm" else ""
        told = f"its records have no {name}, which {flag} asks for{needed}"
        raise InputError(f"{run / METRICS}: {told}") from error


def read_collectives(run: Path) -> list[dict[str, Any]]:
    """Return the rows that `collectives/compare_collectives.py` has measured; `InputError` if a folder has none."""
    try:
        rows = [json.loads(line) for line in (run / "collectives.jsonl").read_text().splitlines()]
        columns = {"operation", "topology", "size_bytes", "measured_seconds", "predicted_seconds"}
        require(bool(rows) and all(columns <= row.keys() for row in rows), "rows or columns are missing")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{run}: there is no table of collectives ({error})") from error
    return rows


def moving_average(values: list[float], width: int) -> list[float]:
    """Return the mean of each value and the `width` - 1 values before it."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
