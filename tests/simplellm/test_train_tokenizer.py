"""Training a tokenizer: the same text gives the same file, of as many pieces as asked for; and what it refuses."""

import errno
import json
import os
import re
from pathlib import Path

import pytest

from simplellm.errors import InputError
from simplellm.stories import story
from simplellm.tokenizers import SPTokenizer
from simplellm.train_tokenizer import LONGEST_TEXT, Settings, parts_of, training_text, write


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    path = tmp_path / "stories.jsonl"
    texts = (f"Number {index} met {index * index} cats. They said hello.\n\nThe end." for index in range(300))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.mark.parametrize(("vocab_size", "generated"), [(4096, True), (400, False)])
def test_the_same_text_gives_the_same_file(
    vocab_size: int, generated: bool, stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = []
    for name in ("first.model", "second.model"):
        write(Settings(str(stories), tmp_path / name, vocab_size, generated))
        models.append((tmp_path / name).read_bytes())
        assert capsys.readouterr().out == f"{tmp_path / name}: {vocab_size:,} pieces, {len(models[-1]):,} bytes\n"
    assert models[0] == models[1]
    tokenizer = SPTokenizer(tmp_path / "first.model")
    assert tokenizer.vocab_size == vocab_size
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 3)
    text = "  two  spaces, \u2581, \x00, caf\u00e9 \U0001f408\n\n\ta tab "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([piece]) for piece in tokenizer.encode("1225")] == [*"1225"], "a piece for each digit"


def test_a_story_follows_each_document_if_it_is_asked_for(stories: Path) -> None:
    plain, mixed = (list(training_text(str(stories), generated)) for generated in (False, True))
    assert mixed[::2] == plain
    assert mixed[1::2] == [story(index, seed=1, split="tokenizer") for index in range(300)]


def test_a_document_that_sentencepiece_would_skip_is_read_in_parts(tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("She found an umbrella.\n" * (LONGEST_TEXT // 20), encoding="utf-8")
    write(Settings(str(text), tmp_path / "own.model", vocab_size=380))
    tokenizer = SPTokenizer(tmp_path / "own.model")
    assert [tokenizer.decode([piece]) for piece in tokenizer.encode("She found")] == ["She", " found"]


@pytest.mark.parametrize(
    "document", ["", "one line", "ab\ncd\n\nefghijk\n", "x" * 50, "\U0001f408" * 30 + "\nend", "a\r\nb\u2028cdef"]
)
def test_parts_are_short_and_together_the_document(document: str) -> None:
    parts = parts_of(document, longest=8)
    assert "".join(parts) == document
    assert all(len(part.encode()) <= 8 for part in parts)
    assert parts_of(document) == [document]
    assert parts_of("ab\ncd\n\n\ne\nf\ng\n", longest=8) == ["ab\ncd\n\n\n", "e\nf\ng\n"]


def refusal(settings: Settings) -> str:
    before = {path: path.read_bytes() for path in settings.out.parent.glob("*") if path.is_file()}
    with pytest.raises(InputError) as error:
        write(settings)
    assert {path: path.read_bytes() for path in settings.out.parent.glob("*") if path.is_file()} == before
    return error.value.with_flags()


def test_sizes_that_do_not_fit_the_text_are_refused(stories: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.model"
    too_few = r"--vocab-size 300: bytes and the characters of the text need at least (\d+) pieces"
    least = re.fullmatch(too_few, refusal(Settings(str(stories), out, 300)))
    assert least
    assert f"at least {least[1]} pieces" in refusal(Settings(str(stories), out, int(least[1]) - 1))
    too_many = refusal(Settings(str(stories), out, 100_000))
    assert re.fullmatch(r"--vocab-size 100000: this text gives at most \d+ pieces", too_many)


@pytest.mark.parametrize("vocab_size", [-1, 0, 3, 256, 2**20 + 1, 2**31])
def test_sizes_that_no_text_can_have_are_refused(vocab_size: int, stories: Path, tmp_path: Path) -> None:
    sizes = "as every byte has a piece, give more than 256, and at most 1,048,576"
    assert refusal(Settings(str(stories), tmp_path / "out.model", vocab_size)) == f"--vocab-size {vocab_size}: {sizes}"


def test_a_full_disk_leaves_no_half_tokenizer(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fill_the_disk)
    sentence = f"--out {tmp_path / 'out'}: cannot be written (No space left on device)"
    assert refusal(Settings(str(stories), tmp_path / "out", 400)) == sentence


def test_files_that_cannot_work_are_refused(stories: Path, tmp_path: Path) -> None:
    out, bad, empty = tmp_path / "out.model", tmp_path / "bad.jsonl", tmp_path / "empty.txt"
    blank = tmp_path / "blank.jsonl"
    out.write_text("an earlier one")
    bad.write_text('{"text": "a"}\n{"txt": 3}\n')
    empty.write_text(" \n")
    blank.write_text('{"text": " "}\n')
    assert f"{bad}: line 2 is not a JSON object" in refusal(Settings(str(bad), out))
    for path in (empty, blank):
        no_text = f"--data {path}: the file holds no document; give one with text in it"
        assert refusal(Settings(str(path), out)) == no_text
    missing = f"--data {tmp_path}/no.txt: there is no such file; give a .txt, .jsonl or .parquet file"
    assert refusal(Settings(f"{tmp_path}/no.txt", out)) == missing
    assert refusal(Settings(str(stories), Path("/no/x.model"))) == "--out /no/x.model: there is no folder /no"
    for place in (tmp_path, Path("/dev/null")):
        assert (
            refusal(Settings(str(stories), place)) == f"--out {place}: is a folder or a device; give the path of a file"
        )
    (link := tmp_path / "link.txt").symlink_to(stories)
    for place in (stories, link):
        assert refusal(Settings(str(stories), place)) == f"--out {place}: would replace the text"


@pytest.mark.parametrize("content", [b"\\documentclass{article}", b'{"my": "own"}', b"\x89PNG\r\n"])
def test_a_file_that_is_no_tokenizer_is_not_replaced(content: bytes, tmp_path: Path) -> None:
    out, stories = tmp_path / "out", tmp_path / "stories.txt"
    stories.write_text("Once upon a time there was a dog. It slept.\n\n" * 20)
    out.write_bytes(content)
    sentence = f"--out {out}: is a file that is not a tokenizer; give a new path"
    assert refusal(Settings(str(stories), out, 300)) == sentence
    assert out.read_bytes() == content
