"""The records that a run in its own folder keeps when it is resumed or repaired."""

import json
from pathlib import Path


def keep_records(path: Path, before: int) -> None:
    """Atomically reduce a run's `metrics.jsonl` to the complete lines of steps before `before`."""
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
