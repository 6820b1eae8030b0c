"""Files of documents, in each format that the lab reads."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

TEXTS = [f"Story {index} is short.\n\nIt has two parts, and it ends." for index in range(45)]


def write_documents(path: Path, texts: Sequence[str] = TEXTS) -> Path:
    """Write documents to a file, in the format that its name says."""
    if path.suffix == ".txt":
        path.write_text("\n<|endoftext|>\n".join(texts) + "\n", encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts), encoding="utf-8")
    else:
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=7)
    return path
