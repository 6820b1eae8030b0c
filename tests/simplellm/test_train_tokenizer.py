"""Training a tokenizer: the same text gives the same file, of as many pieces as asked for; and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from simplellm.errors import InputError
from simplellm.tokenizers import SPTokenizer
from simplellm.train_tokenizer import Settings, write

TRICKY = ["", "  two  spaces ", "\u2581", "before\x00after", "caf\u00e9 \U0001f408", "line\nbreaks\n\n", "\ta tab"]


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
        assert capsys.readouterr().out == f"{tmp_path / name}: {vocab_size} pieces, {len(models[-1])} bytes\n"
    assert models[0] == models[1]
    tokenizer = SPTokenizer(tmp_path / "first.model")
    assert tokenizer.vocab_size == vocab_size
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 3)
    for text in TRICKY:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_words_of_a_text_are_its_pieces(stories: Path, tmp_path: Path) -> None:
    write(Settings(str(stories), tmp_path / "own.model", vocab_size=410))
    tokenizer = SPTokenizer(tmp_path / "own.model")
    assert [tokenizer.decode([piece]) for piece in tokenizer.encode("They said hello.")] == [
        "They",
        " said",
        " hello",
        ".",
    ]


def refusal(settings: Settings) -> str:
    with pytest.raises(InputError) as error:
        write(settings)
    assert not settings.out.is_file()
    return str(error.value)


def test_what_cannot_work_is_refused(stories: Path, tmp_path: Path) -> None:
    out, bad, empty = tmp_path / "out.model", tmp_path / "bad.jsonl", tmp_path / "empty.txt"
    bad.write_text('{"text": "a"}\n{"txt": 3}\n')
    empty.write_text(" \n")
    least = re.fullmatch(
        r"--vocab-size 100: bytes and the characters of the text need at least (\d+) pieces",
        refusal(Settings(str(stories), out, 100)),
    )
    assert least
    assert f"at least {least[1]} pieces" in refusal(Settings(str(stories), out, int(least[1]) - 1))
    too_many = refusal(Settings(str(stories), out, 100_000))
    assert re.fullmatch(r"--vocab-size 100000: this text gives at most \d+ pieces", too_many)
    assert refusal(Settings(str(stories), out, 0)) == "--vocab-size 0: must be at least 1"
    assert f"{bad}: line 2 is no JSON object" in refusal(Settings(str(bad), out))
    assert refusal(Settings(str(empty), out)) == f"--data {empty}: the file has no text; give one that has"
    missing = f"--data {tmp_path}/no.txt: there is no such file; give a .txt, .jsonl or .parquet file"
    assert refusal(Settings(f"{tmp_path}/no.txt", out)) == missing
    assert refusal(Settings(str(stories), Path("/no/x.model"))) == "--out /no/x.model: there is no folder /no"
    assert refusal(Settings(str(stories), tmp_path, 400)) == f"--out {tmp_path}: cannot be written (Is a directory)"
