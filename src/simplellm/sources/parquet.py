"""Parquet files."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simplellm.errors import require_package
from simplellm.sources.source import Source, first_line, unusable


class Parquet(Source):
    """Parquet files, one after another, whose column "text" contains the documents."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def read(self, start: int) -> Iterator[str]:
        for path in self._paths:
            with _parquet(path) as file:
                for group in range(file.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    if start >= rows:  # skip the group without reading it
                        start -= rows
                        continue
                    for batch in file.iter_batches(row_groups=[group], columns=["text"], batch_size=256):
                        for text in batch.column(0)[start:].to_pylist():
                            if not isinstance(text, str):
                                raise unusable(path, f'the column "text" holds {text!r:.50}; it is to hold text')
                            yield text
                        start = max(0, start - batch.num_rows)

    def count(self) -> int:
        total = 0
        for path in self._paths:
            with _parquet(path) as file:
                total += file.metadata.num_rows
        return total


def check_ends(path: Path) -> None:
    """Raise `OSError` unless a file can be read and begins and ends as a Parquet file does."""
    mark = b"PAR1"
    with path.open("rb") as file:
        beginning = file.read(len(mark))
        file.seek(-min(len(mark), file.seek(0, os.SEEK_END)), os.SEEK_END)
        if beginning != mark or file.read() != mark:
            raise OSError(errno.EINVAL, "not a complete Parquet file", str(path))


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Yield a Parquet file with a column "text"; errors when it is opened or read become an InputError."""
    require_package("pyarrow", f"data {path}", "data")
    from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]  # here, because it takes 0.2 s

    wanted = 'give a .parquet file with a string column "text"'
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if "text" not in columns:
                raise unusable(path, f'has no column "text", only {", ".join(columns)}; {wanted}')
            yield file
    except UnicodeDecodeError:
        raise unusable(path, 'the column "text" is not UTF-8; give a file in UTF-8') from None
    except (ArrowException, OSError) as error:
        raise unusable(path, f"is broken or not a Parquet file ({first_line(error)}); {wanted}") from error
