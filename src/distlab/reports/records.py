"""Reading the records in the folders of runs; without torch, as a page needs none."""

import json
from pathlib import Path
from typing import Any

from distlab.reports import METRICS
from simplellm.errors import InputError


def newest_run(folder: Path) -> Path:
    """Return a run's folder, or in a folder of runs, such as `runs/intro`, the run that began last."""
    runs = [file.parent for file in folder.glob("*/config.json")] if not (folder / "config.json").exists() else []
    return max(runs, key=lambda run: (run / "config.json").stat().st_mtime, default=folder)


def read_steps(run: Path, *keys: str) -> list[dict[str, Any]]:
    """Return the records of a run's steps, each with at least these keys; [] if it has none.

    The last line may not be complete: the run is writing it, or was killed.

    Raises:
        InputError: a line is not such a record.
    """
    path = run / METRICS
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith(b"\n")]
        for record in records:
            if not (isinstance(record, dict) and all(_has_number(record, key) for key in keys)):
                raise ValueError(f"a line without a number for {' or '.join(keys)}")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: these are not the metrics of a run ({error})") from error
    return records


def _has_number(record: dict[str, Any], key: str) -> bool:
    """Return whether a record has a number for a key; a loss may be unknown."""
    value = record.get(key, "")
    return isinstance(value, int if key == "step" else int | float) or (key == "loss" and value is None)


def keep_records(path: Path, before: int) -> None:
    """Atomically reduce a run's `METRICS` to the complete lines of steps before `before`."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = path.with_suffix(".kept")
    kept.write_bytes(b"".join(line for line in lines if line.endswith(b"\n") and _is_before(line, before)))
    kept.replace(path)


def _is_before(line: bytes, step: int) -> bool:
    """Return whether a line is the record of an earlier step; a power cut may leave a line that is not a record."""
    try:
        return bool(json.loads(line)["step"] < step)
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def read_largest(run: Path) -> list[int]:
    """Return the counts of the rank that holds the most; `InputError` if they cannot be read."""
    from distlab.reports.memory import MEMORY_KINDS, ONLY_SOME

    try:
        by_rank = json.loads((run / "memory.json").read_text())
        return max(([(dict.fromkeys(ONLY_SOME, 0) | rank)[kind] for kind in MEMORY_KINDS] for rank in by_rank), key=sum)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{run}: there are no memory counts of a run ({error})") from error
