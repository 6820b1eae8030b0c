"""Stories from files of three formats, and bad files."""

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch
from support.story_files import TEXTS, write_documents

from simplellm import sources
from simplellm.dataloaders import TinyStories
from simplellm.errors import InputError
from simplellm.sources import files, parquet
from simplellm.tokenizers import SPTokenizer

TOKENIZER = SPTokenizer()


def documents(path: Path, split: str = "train", start: int = 0) -> Iterator[str]:
    source = sources.open_source(str(path), split, seed=0)
    source.check_text()
    return source.read(start)


# -------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_a_file_is_split(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_documents(tmp_path / f"stories.{ending}")
    monkeypatch.setenv("HOME", str(tmp_path))
    train = [text for index, text in enumerate(TEXTS) if index % 20 != 19]
    validation = [TEXTS[19], TEXTS[39]]
    for start in (*range(45), 100):
        assert list(documents(path, start=start)) == train[start:], start
    for start in range(4):
        assert list(documents(path, "validation", start)) == validation[start:]
    for split, texts in (("train", train), ("validation", validation)):
        assert sources.open_source(f"~/{path.name}", split, seed=0).count() == len(texts)


def test_a_start_within_a_large_row_group(tmp_path: Path) -> None:
    texts = [f"Story {index}." for index in range(1500)]
    path = tmp_path / "large.parquet"
    pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)
    for start in (0, 255, 256, 300, 700, 999, 1000, 1300):
        assert list(parquet.Parquet([path]).read(start)) == texts[start:]
    pq.write_table(pa.table({"text": ["One more."]}), more := tmp_path / "more.parquet")
    for start in (1499, 1500, 1501):
        assert list(parquet.Parquet([path, more]).read(start)) == [*texts, "One more."][start:]


def test_text_between_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "plain.TXT"
    path.write_bytes(b"\xef\xbb\xbfOne,\r\nstill one.\r\n \r\n\r\n\r\nTwo <|endoftext|> goes on.\r\n\r\nThree.")
    assert list(documents(path)) == ["One,\nstill one.", "Two <|endoftext|> goes on.", "Three."]


def test_text_between_markers_keeps_its_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "marked.txt"
    path.write_text("<|endoftext|>\n\nOne.\n\nStill one.\n<|endoftext|>\n\n<|endoftext|> \nTwo.\n")
    assert list(documents(path)) == ["One.\n\nStill one.", "Two."]


@pytest.mark.parametrize(
    "content",
    [
        "One.<|endoftext|>\nTwo.\n\nStill two.<|endoftext|>\nThree.<|endoftext|>\n",
        "One. <|endoftext|> \r\nTwo.\r\n\r\nStill two.<|endoftext|>\r\nThree.",
        "<|endoftext|>One.\n<|endoftext|>Two.\n\nStill two.\n<|endoftext|>Three.\n",
        "One.<|endoftext|>Two.\n\nStill two.<|endoftext|>Three.<|endoftext|>",
        "One.\n<|endoftext|>\n<|endoftext|>Two.\n\nStill two.<|endoftext|><|endoftext|>\n\nThree.\n\n",
    ],
    ids=["end", "end with spaces", "beginning", "several on a line", "mixed"],
)
def test_a_marker_ends_a_document_wherever_it_stands_on_a_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "marked.txt"
    path.write_bytes(content.encode())
    assert [*files.open_file(str(path)).read(0)] == ["One.", "Two.\n\nStill two.", "Three."]
    assert [*files.open_file(str(path)).read(1)] == ["Two.\n\nStill two.", "Three."]


@pytest.mark.parametrize("between", ["<|endoftext|>", ""])
def test_a_byte_order_mark_changes_nothing(tmp_path: Path, between: str) -> None:
    path = tmp_path / "marked.txt"
    content = f"{between}\nOne.\n{between}\nTwo.\n"
    batches = []
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + content.encode())
        assert list(documents(path)) == ["One.", "Two."]
        batches.append(next(TinyStories(TOKENIZER, data=str(path), seq_l=32)))
    assert torch.equal(*batches)
    path.write_bytes(b"\xef\xbb\xbf<|endoftext|>\nOne.\n\nStill one.\n")
    assert next(documents(path)) == "One.\n\nStill one."


def test_a_story_on_each_line_is_one_document_and_the_message_says_what_separates(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(f"Story {index}." for index in range(50)))
    assert next(documents(path)).count("\n") == 49
    with pytest.raises(InputError) as error:
        next(documents(path, "validation"))
    assert str(error.value) == (
        f"data {path}: validation takes every 20th document and there are only 1; give a longer file, or put a blank "
        'line (or "<|endoftext|>") between its documents'
    )
    path.write_text("\n\n".join(f"Story {index}." for index in range(50)))
    assert next(documents(path, "validation")) == "Story 19."


def test_json_lines_may_be_blank_and_texts_empty(tmp_path: Path) -> None:
    path = tmp_path / "gaps.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": ""}\n{"text": "\\u00e9"}')
    assert list(documents(path)) == ["a", "", "é"]


def test_validation_documents_without_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_documents(tmp_path / "stories.jsonl", ["One."] * 19 + [""])
    assert next(documents(path)) == "One."
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match=f"^data {path}: every validation document is blank; give a file"):
        documents(Path("~/stories.jsonl"), "validation")


# ------------------------------------------------------------------------------------------------------------ bad input

GOOD_LINES = "Ünce in X\n".encode() * 200_000  # more than is looked at in one go
WANTED = r"give sample, tinystories, or the path of a \.txt, \.jsonl or \.parquet file$"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.txt", None, "there is no such file; " + WANTED),
        ("", None, "is a folder; " + WANTED),
        ("stories.csv", b"text\nOnce", "its name does not tell its format; " + WANTED),
        ("stories", b"Once", "its name does not tell its format; " + WANTED),
        ("empty.txt", b"", "the file holds no document; give one with text in it$"),
        ("blank.txt", b"\n \n\t\n", "the file holds no document; "),
        ("marks.txt", b"<|endoftext|>\n<|endoftext|>\n", "the file holds no document; "),
        ("empty.jsonl", b"", "the file holds no document; "),
        ("blank.jsonl", b"\n\n", "the file holds no document; "),
        ("textless.jsonl", b'{"text": ""}\n{"text": " "}\n', "every train document is blank; give a file with text"),
        ("wide.txt", "\u3000\n\n\u3000\n".encode(), "every train document is blank; "),
        ("latin.txt", b"one\nstill\ncaf\xe9\n", r"line 3 \(byte 13\) is not UTF-8; give a file in UTF-8$"),
        ("latin.jsonl", b'\n{"text": "caf\xe9"}\n', r"line 2 \(byte 14\) is not UTF-8; give a file in UTF-8$"),
        ("utf16.txt", "Once".encode("utf-16"), r"line 1 \(byte 0\) is not UTF-8; "),
        ("unmarked.txt", "Once".encode("utf-16-le"), r"line 1 \(byte 1\) has a NUL, as in UTF-16 or binary data; "),
        ("unmarked.jsonl", '\n{"text": "a"}'.encode("utf-16-be"), r"line 1 \(byte 0\) has a NUL, "),
        ("zeros.txt", b"Once.\n\n" + bytes(2000), r"line 3 \(byte 7\) has a NUL, "),
        ("late.txt", GOOD_LINES + b"caf\xe9\n", r"line 200001 \(byte 2200003\) is not UTF-8; give a file in UTF-8$"),
        ("late.jsonl", b'{"text": "a"}\n' * 200_000 + b'{"text": "\xff"}\n', r"line 200001 \(byte 2800010\) is not"),
        ("late_zero.txt", GOOD_LINES + b"\0\n", r"line 200001 \(byte 2200000\) has a NUL, "),
        ("cut.txt", GOOD_LINES + "é".encode()[:1], r"line 200001 \(byte 2200000\) is not UTF-8; "),
        ("bad.jsonl", b"Once upon a time\n", r'line 1 is not a JSON object with a string "text"; every line'),
        ("cut.jsonl", b'\n{"text": "a', "line 2 is not a JSON object"),
        ("list.jsonl", b"[1, 2]\n", "line 1 is not a JSON object"),
        ("string.jsonl", b'"text"\n', "line 1 is not a JSON object"),
        ("story.jsonl", b'{"story": "a"}\n', "line 1 is not a JSON object"),
        ("number.jsonl", b'{"text": 7}\n', "line 1 is not a JSON object"),
        ("half.jsonl", b'{"text": "\\ud83d"}\n', "line 1 is not a JSON object"),
        ("deep.jsonl", b"[" * 100_000, "line 1 is not a JSON object"),
        ("bad.parquet", b"PAR1 nonsense PAR1", r"is broken or not a Parquet file \(.*\); give a \.parquet"),
        ("empty.parquet", b"", "is broken or not a Parquet file"),
    ],
)
def test_bad_files_are_found_at_the_start(tmp_path: Path, name: str, content: bytes | None, sentence: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=rf"^data {re.escape(str(path))}: {sentence}"):
        TinyStories(TOKENIZER, data=str(path))


@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_too_few_documents_for_validation(tmp_path: Path, ending: str) -> None:
    path = write_documents(tmp_path / f"stories.{ending}", TEXTS[:19])
    with pytest.raises(
        InputError, match=r"^data \S+: validation takes every 20th document and there are only 19; give a"
    ):
        TinyStories(TOKENIZER, data=str(path), split="validation")
    write_documents(tmp_path / f"stories.{ending}", TEXTS[:20])
    assert next(documents(path, "validation")) == TEXTS[19]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"story": ["a"], "id": [1]}, 'has no column "text", only story, id; give a .parquet'),
        ({"text": [1]}, 'the column "text" holds 1; it is to hold text'),
        ({"text": ["a", None]}, 'the column "text" holds None; it is to hold text'),
        ({"text": []}, "the file holds no document; give one with text in it"),
        ({"text": ["", "\n"]}, "every train document is blank; give a file with text in it"),
    ],
)
def test_parquet_files_with_other_columns(tmp_path: Path, table: dict[str, object], sentence: str) -> None:
    path = tmp_path / "other.parquet"
    schema = None if any(table.values()) else pa.schema({"text": pa.string()})
    pq.write_table(pa.table(table, schema), path)
    with pytest.raises(InputError) as error:
        list(documents(path))
    assert str(error.value).startswith(f"data {path}: {sentence}")


def test_a_parquet_file_whose_text_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.parquet"
    pq.write_table(pa.table({"text": pa.array([b"One.", b"caf\xe9"]).view(pa.string())}), path)
    with pytest.raises(InputError) as error:
        next(documents(path))
    assert str(error.value) == f'data {path}: the column "text" is not UTF-8; give a file in UTF-8'


def test_a_parquet_file_that_is_damaged_inside(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "stories.parquet")
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"^data \S+: is broken or not a Parquet file"):
        TinyStories(TOKENIZER, data=str(path))


def test_a_bad_line_further_on_is_named_when_it_is_reached(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "stories.jsonl")
    with path.open("a") as file:
        file.write("oops\n")
    with pytest.raises(InputError, match="line 46 is not a JSON object"):
        list(documents(path))
