"""Batches: the same global batch in every layout, exact positions, every source, and every sentence for bad data."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch

from simplellm import dataloaders
from simplellm.dataloaders import TinyStories, choose_source
from simplellm.errors import InputError
from simplellm.stories import story
from simplellm.tokenizers import SPTokenizer

TOKENIZER = SPTokenizer()
EOS = TOKENIZER.eos_id


class Letters:
    """One token a character, so that a test can count."""

    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def sample(**options: object) -> TinyStories:
    return TinyStories(TOKENIZER, data="sample", **options)  # type: ignore[arg-type]


def letters(path: Path, **options: object) -> TinyStories:
    return TinyStories(Letters(), data=str(path), **{"seq_l": 2, **options})  # type: ignore[arg-type]


def documents(path: Path, split: str = "train", start: int = 0) -> Iterator[str]:
    return dataloaders.open_source(str(path), split, seed=0).documents(start)


def stream(texts: list[str]) -> list[int]:
    return [id for text in texts for id in [*TOKENIZER.encode(text), EOS]]


@pytest.fixture
def unreachable_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


# ---------------------------------------------------------------------------------------------------- which token where


def test_batches_are_the_documents_joined_by_end_of_document_and_cut() -> None:
    batches = torch.stack(list(islice(sample(batch_size=3, seq_l=50), 20)))
    assert batches.dtype == torch.int64
    assert batches.shape == (20, 3, 50)
    wanted = stream([story(index) for index in range(20)])
    assert batches.flatten().tolist() == wanted[:3000]
    assert 10 < wanted[:3000].count(EOS) < 20


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_rows_of_all_ranks_are_the_batch_of_one_process(world: int) -> None:
    alone = sample(batch_size=2 * world, seq_l=64, skip=3)
    ranks = [sample(batch_size=2, seq_l=64, skip=3, rank=rank, num_replicas=world) for rank in range(world)]
    last = torch.zeros(0)
    for _ in range(12):
        whole = next(alone)
        assert torch.equal(torch.cat([next(rank) for rank in ranks]), whole)
        assert not torch.equal(whole, last)
        last = whole
        assert {tuple(rank.state_dict().items()) for rank in ranks} == {tuple(alone.state_dict().items())}


def test_the_layout_may_change_on_the_way() -> None:
    alone = torch.stack(list(islice(sample(batch_size=6, seq_l=32), 9))).view(-1, 32)
    three = [sample(batch_size=2, seq_l=32, rank=rank, num_replicas=3) for rank in range(3)]
    rows = [torch.cat([next(rank) for rank in three]) for _ in range(4)]
    position = three[2].state_dict()
    assert position == json.loads(json.dumps(position))

    two = [sample(batch_size=3, seq_l=32, rank=rank, num_replicas=2) for rank in range(2)]
    for rank in two:
        next(rank)
        rank.load_state_dict(position)
    rows += [torch.cat([next(rank) for rank in two]) for _ in range(5)]
    assert torch.equal(torch.cat(rows), alone)


@pytest.mark.parametrize("steps", range(12))
def test_a_position_is_exact_wherever_the_cut_falls(tmp_path: Path, steps: int) -> None:
    """Documents of 2, 3 and 4 tokens with their end, cut into steps of 3: cuts fall within and between documents."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["a", "bc", "def"]))
    data = letters(path, seq_l=3)
    for _ in range(steps):
        next(data)
    tokens = 3 * steps
    document, offset = tokens // 9 * 3, tokens % 9
    for length in (2, 3):
        if offset >= length:
            document, offset = document + 1, offset - length
        else:
            break
    assert data.state_dict() == {"document": document, "offset": offset}
    again = letters(path, seq_l=3)
    again.load_state_dict(data.state_dict())
    assert again.state_dict() == data.state_dict()
    for _ in range(5):
        assert torch.equal(next(again), next(data))


def test_restoring_does_not_read_what_came_before() -> None:
    class Counting(SPTokenizer):
        encoded = 0

        def encode(self, text: str) -> list[int]:
            self.encoded += 1
            return super().encode(text)

    tokenizer = Counting()
    data = TinyStories(tokenizer, data="sample")
    data.load_state_dict({"document": 10**9, "offset": 10})
    next(data)
    assert tokenizer.encoded <= 4
    assert data.state_dict()["document"] >= 10**9


def test_skip_and_iter_and_seed_and_split() -> None:
    assert next(sample(skip=5))[0].tolist() == stream([story(index) for index in range(5, 12)])[:256]
    data = sample()
    first = next(iter(data))
    assert not torch.equal(next(iter(data)), first)  # iter goes on; it does not start again
    assert next(sample(seed=1))[0].tolist() == stream([story(index, seed=1) for index in range(4)])[:256]
    validation = next(sample(split="validation"))[0].tolist()
    assert validation == stream([story(index, split="validation") for index in range(4)])[:256]


def test_it_starts_at_once() -> None:
    started = time.perf_counter()
    next(sample(batch_size=3))
    assert time.perf_counter() - started < 0.05


def test_it_keeps_nothing_that_it_gave() -> None:
    data = sample(batch_size=2, seq_l=64)
    for _ in range(200):
        next(data)
    assert len(data._tokens) < 1000
    assert len(data._lengths) < 10


# -------------------------------------------------------------------------------------------------------------- files

TEXTS = [f"Story {index} is short.\n\nIt has two parts, and it ends." for index in range(45)]


def write(folder: Path, ending: str, texts: list[str] = TEXTS) -> Path:
    path = folder / f"stories.{ending}"
    if ending == "txt":
        path.write_text("\n<|endoftext|>\n".join(texts) + "\n", encoding="utf-8")
    elif ending == "jsonl":
        path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts), encoding="utf-8")
    else:
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=7)
    return path


@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_a_file_is_split_and_starts_again_at_its_end(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path, ending)
    train = [text for index, text in enumerate(TEXTS) if index % 20 != 19]
    validation = [TEXTS[19], TEXTS[39]]
    assert list(islice(documents(path), 100)) == (train * 3)[:100]
    assert list(islice(documents(path, "validation"), 7)) == (validation * 4)[:7]
    for start in (1, 18, 19, 20, 37, 42, 43, 44, 100, 430):
        assert list(islice(documents(path, start=start), 50)) == (train * 13)[start : start + 50], start
    for start in (1, 2, 9):
        assert list(islice(documents(path, "validation", start), 5)) == (validation * 8)[start : start + 5]


def test_a_start_within_a_large_row_group(tmp_path: Path) -> None:
    texts = [f"Story {index}." for index in range(1500)]
    path = tmp_path / "large.parquet"
    pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)
    for start in (0, 255, 256, 300, 700, 999, 1000, 1300):
        assert list(islice(dataloaders.Parquet([path]).documents(start), 300)) == (texts * 2)[start : start + 300]


def test_batches_of_a_small_file_never_end(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", ["abc"])
    assert torch.cat([next(letters(path, batch_size=5, seq_l=3))]).flatten().tolist() == [97, 98, 99, 0] * 3 + [
        97,
        98,
        99,
    ]


def test_text_between_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "plain.TXT"
    path.write_bytes(b"\xef\xbb\xbfOne,\r\nstill one.\r\n \r\n\r\n\r\nTwo <|endoftext|> goes on.\r\n\r\nThree.")
    assert list(islice(documents(path), 4)) == [
        "One,\nstill one.",
        "Two <|endoftext|> goes on.",
        "Three.",
        "One,\nstill one.",
    ]


def test_text_between_markers_keeps_its_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "marked.txt"
    path.write_text("<|endoftext|>\n\nOne.\n\nStill one.\n<|endoftext|>\n\n<|endoftext|> \nTwo.\n")
    assert list(islice(documents(path), 3)) == ["One.\n\nStill one.", "Two.", "One.\n\nStill one."]


def test_json_lines_may_be_blank_and_texts_empty(tmp_path: Path) -> None:
    path = tmp_path / "gaps.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": ""}\n{"text": "\\u00e9"}')
    assert list(islice(documents(path), 4)) == ["a", "", "é", "a"]
    assert next(letters(path, seq_l=5)).tolist() == [[97, 0, 0, 233, 0]]


# -------------------------------------------------------------------------------------------------------------- the hub


@pytest.fixture
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder laid out like the hub's data set, read by the same code."""
    folder = tmp_path / "TinyStories"
    (folder / "data").mkdir(parents=True)
    for name, texts in (("train-00000-of-00002", TEXTS[:20]), ("train-00001-of-00002", TEXTS[20:40])):
        pq.write_table(pa.table({"text": texts}), folder / "data" / f"{name}-0123456789abcdef.parquet")
    pq.write_table(
        pa.table({"text": TEXTS[40:]}), folder / "data" / "validation-00000-of-00001-0123456789abcdef.parquet"
    )
    monkeypatch.setattr(dataloaders, "HUB_REPOSITORY", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return folder


def test_streaming_from_the_hub(local_hub: Path) -> None:
    source = dataloaders.open_source("tinystories", "train", seed=0)
    assert isinstance(source, dataloaders.Hub)
    assert list(islice(source.documents(0), 90)) == (TEXTS[:40] * 3)[:90]
    assert list(islice(source.documents(33), 10)) == (TEXTS[:40] * 2)[33:43]
    assert list(islice(source.documents(85), 3)) == TEXTS[5:8]
    data = TinyStories(TOKENIZER, data="tinystories", split="validation", batch_size=2, seq_l=40)
    assert next(data).flatten().tolist() == stream(TEXTS[40:] * 3)[:80]
    position = data.state_dict()
    following = next(data)
    data.load_state_dict(position)
    assert torch.equal(next(data), following)


def test_a_hub_without_the_split(local_hub: Path) -> None:
    for file in local_hub.glob("data/validation*"):
        file.unlink()
    with pytest.raises(InputError, match=r"^--data tinystories: .* cannot be read \(.*validation.*\); give sample, or"):
        dataloaders.open_source("tinystories", "validation", seed=0)


def test_a_hub_that_breaks_off(local_hub: Path) -> None:
    for file in local_hub.glob("data/train-00000*"):
        file.write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(
        InputError, match=r"^--data tinystories: .* cannot be read \(.+\); give sample, or the path of a"
    ):
        TinyStories(TOKENIZER, data="tinystories")


def test_the_local_cache_serves_without_a_network(
    local_hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreachable_hub: None
) -> None:
    monkeypatch.setattr(dataloaders, "HUB_REPOSITORY", "roneneldan/TinyStories")
    snapshot = (
        tmp_path
        / "cache"
        / "datasets--roneneldan--TinyStories"
        / "snapshots"
        / "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
    )
    snapshot.mkdir(parents=True)
    (local_hub / "data").rename(snapshot / "data")
    assert choose_source("auto") == ("tinystories", "the hub's TinyStories: it is in the local cache")
    source = dataloaders.open_source("tinystories", "train", seed=0)
    assert list(islice(source.documents(18), 30)) == (TEXTS[:40] * 2)[18:48]
    assert next(dataloaders.open_source("tinystories", "validation", seed=0).documents(7)) == TEXTS[42]

    next(snapshot.glob("data/train-00001*")).unlink()  # half of the files are not the data set
    assert choose_source("auto")[0] == "sample"


def test_choices_that_need_no_thought() -> None:
    assert choose_source("sample") == ("sample", "the generator, as --data asks")
    assert choose_source("tinystories") == ("tinystories", "the hub's TinyStories, as --data asks")
    assert choose_source("no/such.txt") == ("no/such.txt", "no/such.txt, as --data asks")


class Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"id": "roneneldan/TinyStories", "_id": "1", "tags": [], "siblings": []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def chosen(tmp_path: Path, **environment: str) -> tuple[str, str, float]:
    """What "auto" chooses in a fresh process, why, and in how many seconds; it must not import datasets for that."""
    code = (
        "import time, sys, json; from simplellm.dataloaders import choose_source; started = time.perf_counter();"
        "answer = choose_source('auto'); seconds = time.perf_counter() - started;"
        "assert 'datasets' not in sys.modules; print(json.dumps([*answer, seconds]))"
    )
    clean = {
        name: value for name, value in os.environ.items() if not name.upper().startswith(("HF_", "HTTP", "ALL_PROXY"))
    }
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "HF_HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    source, why, seconds = json.loads(result.stdout)
    return source, why, seconds


def test_auto_takes_the_hub_if_it_answers(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    source, why, _ = chosen(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    assert (source, why) == ("tinystories", "the hub's TinyStories: the hub answers")


def test_auto_takes_the_generator_if_the_hub_hangs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and never says a word
        source, why, seconds = chosen(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert source == "sample"
    assert why.startswith("the generator: the hub's TinyStories cannot be reached (")
    assert seconds < 3


def test_auto_takes_the_generator_if_names_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *arguments, **options: time.sleep(10))
    started = time.perf_counter()
    problem = dataloaders.hub_problem(seconds=0.5)
    assert time.perf_counter() - started < 1
    assert problem == "no answer within 0.5 seconds"


def test_auto_takes_the_generator_at_once_if_offline(tmp_path: Path) -> None:
    source, why, seconds = chosen(tmp_path, HF_HUB_OFFLINE="1")
    assert source == "sample"
    assert why == "the generator: the hub's TinyStories cannot be reached (HF_HUB_OFFLINE is set)"
    assert seconds < 0.5


def test_without_hub_and_cache_tinystories_ends_and_auto_goes_on(unreachable_hub: None) -> None:
    with pytest.raises(InputError) as error:
        TinyStories(TOKENIZER, data="tinystories")
    assert str(error.value) == (
        "--data tinystories: roneneldan/TinyStories cannot be read (the hub cannot be reached and nothing is cached: "
        "HF_HUB_OFFLINE is set); give sample, or the path of a .txt, .jsonl or .parquet file"
    )
    assert torch.equal(next(TinyStories(TOKENIZER)), next(sample()))


# ------------------------------------------------------------------------------------------------------------ bad input

WANTED = r"give sample, tinystories, or the path of a \.txt, \.jsonl or \.parquet file$"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "--batch-size 0: a batch needs at least 1 sequence"),
        ({"seq_l": 1}, "--seq-len 1: a sequence needs at least 2 tokens, one to read and one to predict"),
        ({"skip": -1}, "skip=-1: documents to skip are 0 or more"),
        ({"num_replicas": 0}, "num_replicas=0: there is at least 1 replica"),
        ({"rank": 3, "num_replicas": 3}, "rank=3: a rank among 3 replicas is from 0 to 2"),
        ({"rank": -1}, "rank=-1: a rank among 1 replicas is from 0 to 0"),
        ({"split": "test"}, 'split="test": the splits are train and validation'),
    ],
)
def test_arguments_out_of_range(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        sample(**options)
    assert str(error.value) == sentence


def test_a_tokenizer_without_an_end_of_document() -> None:
    class Endless(Letters):
        eos_id = -1

    with pytest.raises(
        InputError, match=r"^--tokenizer: the model has no end-of-document piece \(eos\); give one that has$"
    ):
        TinyStories(Endless(), data="sample")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.txt", None, "there is no such file; " + WANTED),
        ("stories.csv", b"text\nOnce", "its name does not tell its format; " + WANTED),
        ("stories", b"Once", "its name does not tell its format; " + WANTED),
        ("empty.txt", b"", "the file holds no document; give one with text in it$"),
        ("blank.txt", b"\n \n\t\n", "the file holds no document; "),
        ("marks.txt", b"<|endoftext|>\n<|endoftext|>\n", "the file holds no document; "),
        ("empty.jsonl", b"", "the file holds no document; "),
        ("blank.jsonl", b"\n\n", "the file holds no document; "),
        ("latin.txt", b"one\nstill\ncaf\xe9\n", r"line 3 is not UTF-8; give a file in UTF-8$"),
        ("latin.jsonl", b'\n{"text": "caf\xe9"}\n', r"line 2 is not UTF-8; give a file in UTF-8$"),
        ("utf16.txt", "Once".encode("utf-16"), r"line 1 is not UTF-8; "),
        (
            "bad.jsonl",
            b"Once upon a time\n",
            r'line 1 is no JSON object with a string "text"; every line is to be like',
        ),
        ("cut.jsonl", b'\n{"text": "a', "line 2 is no JSON object"),
        ("list.jsonl", b"[1, 2]\n", "line 1 is no JSON object"),
        ("string.jsonl", b'"text"\n', "line 1 is no JSON object"),
        ("story.jsonl", b'{"story": "a"}\n', "line 1 is no JSON object"),
        ("number.jsonl", b'{"text": 7}\n', "line 1 is no JSON object"),
        ("null.jsonl", b'{"text": null}\n', "line 1 is no JSON object"),
        ("half.jsonl", b'{"text": "\\ud83d"}\n', "line 1 is no JSON object"),
        ("deep.jsonl", b"[" * 100_000, "line 1 is no JSON object"),
        (
            "bad.parquet",
            b"PAR1 nonsense PAR1",
            r"is broken or no Parquet file \(.*\); give a \.parquet file with a string",
        ),
        ("empty.parquet", b"", "is broken or no Parquet file"),
    ],
)
def test_bad_files_are_found_at_the_start(tmp_path: Path, name: str, content: bytes | None, sentence: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=rf"^--data {re.escape(str(path))}: {sentence}"):
        TinyStories(TOKENIZER, data=str(path))


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^--data {re.escape(str(tmp_path))}: is a folder; {WANTED}"):
        TinyStories(TOKENIZER, data=str(tmp_path))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "jsonl")

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")  # root, who may run the tests, is refused nothing

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"^--data \S+: cannot be read \(Permission denied\); give a file that can$"):
        TinyStories(TOKENIZER, data=str(path))


@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_too_few_documents_for_validation(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path, ending, TEXTS[:19])
    with pytest.raises(
        InputError, match=r"^--data \S+: validation takes every 20th document and there are only 19; give a"
    ):
        TinyStories(TOKENIZER, data=str(path), split="validation")
    write(tmp_path, ending, TEXTS[:20])
    assert next(documents(path, "validation")) == TEXTS[19]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            {"story": ["a"], "id": [1]},
            'has no column "text", only story, id; give a .parquet file with a string column "text"',
        ),
        ({"text": [1]}, 'the column "text" holds 1; it is to hold text'),
        ({"text": ["a", None]}, 'the column "text" holds None; it is to hold text'),
        ({"text": pa.array([], pa.string())}, "the file holds no document; give one with text in it"),
    ],
)
def test_parquet_files_with_other_columns(tmp_path: Path, table: dict[str, object], sentence: str) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table(table), path)
    with pytest.raises(InputError) as error:
        list(islice(documents(path), 2))
    assert str(error.value) == f"--data {path}: {sentence}"


def test_a_parquet_file_that_is_damaged_inside(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet")
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"^--data \S+: is broken or no Parquet file"):
        TinyStories(TOKENIZER, data=str(path))


def test_a_bad_line_further_on_is_named_when_it_is_reached(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")
    with path.open("a") as file:
        file.write("oops\n")
    with pytest.raises(InputError, match="line 46 is no JSON object"):
        list(islice(documents(path), 50))


def test_a_position_that_does_not_exist(tmp_path: Path) -> None:
    data = letters(write(tmp_path, "jsonl", ["abc", "de"]))
    data.load_state_dict({"document": 1, "offset": 2})
    with pytest.raises(InputError) as error:
        data.load_state_dict({"document": 1, "offset": 3})
    assert str(error.value) == (
        "--resume: token 3 of document 1 does not exist (3 tokens); "
        "resume with the data and the tokenizer that the run began with"
    )
