"""TinyStories from the hub or its cache, and what --data auto chooses: a local folder stands in for the hub."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch
from support.processes import run_ranks
from support.story_files import TEXTS

from simplellm import sources
from simplellm.dataloaders import TinyStories
from simplellm.errors import InputError
from simplellm.sources import choose_source, hub
from simplellm.tokenizers import SPTokenizer

TOKENIZER = SPTokenizer()


@pytest.fixture
def unreachable_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


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
    monkeypatch.setattr(hub, "HUB_REPOSITORY", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return folder


def test_streaming_from_the_hub(local_hub: Path) -> None:
    source = sources.open_source("tinystories", "train", seed=0)
    assert isinstance(source, hub.Hub)
    assert list(source.read(0)) == TEXTS[:40]
    assert list(source.read(33)) == TEXTS[33:40]
    data = TinyStories(TOKENIZER, data="tinystories", split="validation", batch_size=2, seq_l=40)
    stream = [token for text in TEXTS[40:] * 3 for token in [*TOKENIZER.encode(text), TOKENIZER.eos_id]]
    assert next(data).flatten().tolist() == stream[:80]
    position = data.state_dict()
    following = next(data)
    data.load_state_dict(position)
    assert torch.equal(next(data), following)


def test_a_hub_without_the_split(local_hub: Path) -> None:
    for file in local_hub.glob("data/validation*"):
        file.unlink()
    with pytest.raises(InputError, match=r"^data tinystories: .* cannot be read \(.*validation.*\); give sample, or"):
        sources.open_source("tinystories", "validation", seed=0)


def test_a_hub_that_breaks_off(local_hub: Path) -> None:
    for file in local_hub.glob("data/train-00000*"):
        file.write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(InputError, match=r"^data tinystories: .* cannot be read \(.+\); give sample, or the path of a"):
        TinyStories(TOKENIZER, data="tinystories")


def test_the_local_cache_serves_without_a_network(
    local_hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreachable_hub: None
) -> None:
    monkeypatch.setattr(hub, "HUB_REPOSITORY", "roneneldan/TinyStories")
    snapshot = (
        tmp_path
        / "cache"
        / "datasets--roneneldan--TinyStories"
        / "snapshots"
        / "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
    )
    snapshot.mkdir(parents=True)
    unknown, one, other = (sources.source_identity("tinystories", "train", 0, which) for which in (None, "abc", "def"))
    assert unknown is None, "nobody knows which stories the hub has"
    assert None is not one != other is not None
    (local_hub / "data").rename(snapshot / "data")
    identity = sources.source_identity("tinystories", "train", seed=0)
    assert identity is not None
    assert identity["files"]
    assert choose_source("auto") == ("tinystories", "the hub's TinyStories: it is in the local cache")
    source = sources.open_source("tinystories", "train", seed=0)
    assert list(source.read(18)) == TEXTS[18:40]
    assert list(sources.open_source("tinystories", "validation", seed=0).read(2)) == TEXTS[42:]

    last = next(snapshot.glob("data/train-00001*"))
    last.write_bytes(last.read_bytes()[:-4])
    with pytest.raises(OSError, match="train-00001"):
        hub.cached_files("train")
    last.unlink()  # half of the files are not the data set
    assert choose_source("auto")[0] == "sample"


def test_a_run_goes_on_when_another_program_fills_the_cache(local_hub: Path, tmp_path: Path) -> None:
    loader = TinyStories(TOKENIZER, 1, 64, data="tinystories")
    next(loader)
    shutil.copytree(local_hub, tmp_path / "cache" / f"datasets--{local_hub}".replace("/", "--") / "snapshots" / "abc")
    assert hub.cached_files("train")
    for _ in range(40):
        next(loader)
    assert loader.state_dict()["document"] > 40, "it reads the stories a second time"


def test_choices_that_need_no_thought() -> None:
    assert choose_source("sample") == ("sample", "the generator")
    assert choose_source("tinystories") == ("tinystories", "the hub's TinyStories")
    assert choose_source("no/such.txt") == ("no/such.txt", "no/such.txt")


def test_a_library_of_the_hub_that_cannot_be_imported_is_a_reason_for_the_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delitem(vars(huggingface_hub), "HfApi", raising=False)  # imported at its first use
    monkeypatch.setitem(sys.modules, "huggingface_hub.hf_api", None)
    why, revision = hub.ask_hub()
    assert why is not None
    assert "huggingface_hub.hf_api" in why
    assert revision is None


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


def chosen(tmp_path: Path, limit: float = hub.SECONDS, **environment: str) -> tuple[str, str, float]:
    """What "auto" chooses in a fresh process, why, and in how many seconds; it must not import datasets for that."""
    code = (
        "import time, sys, json; from simplellm.sources import choose_source, hub; started = time.perf_counter();"
        f"hub.SECONDS = {limit};"
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
    source, why, _ = chosen(tmp_path, 20, HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    assert (source, why) == ("tinystories", "the hub's TinyStories: the hub answers")


def test_auto_takes_the_generator_if_the_hub_hangs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and never says a word
        source, why, seconds = chosen(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert source == "sample"
    assert why.startswith("the generator: the hub's TinyStories cannot be reached (")
    assert seconds < 10


def test_auto_takes_the_generator_if_names_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *arguments, **options: time.sleep(10))
    started, before = time.perf_counter(), {*threading.enumerate()}
    monkeypatch.setattr(hub, "SECONDS", 0.5)
    problem, _ = hub.ask_hub()
    assert time.perf_counter() - started < 5
    assert problem == "no answer within 0.5 seconds"
    asking = {*threading.enumerate()} - before
    assert asking
    assert all(thread.daemon for thread in asking), "the process may end before the answer"


def test_the_hub_tells_its_newest_revision_and_an_error_without_a_message_is_told_by_its_name(
    monkeypatch: pytest.MonkeyPatch, unreachable_hub: None
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "SECONDS", 10.0)
    asked = "huggingface_hub.HfApi.dataset_info"
    monkeypatch.setattr(asked, lambda *_, **__: SimpleNamespace(sha="abc"))
    assert (hub.ask_hub()[0], hub.hub_revision()) == (None, "abc")
    monkeypatch.setattr(asked, fail)
    assert (hub.ask_hub()[0], hub.hub_revision()) == ("TimeoutError", None)


def test_auto_takes_the_generator_at_once_if_offline(tmp_path: Path) -> None:
    source, why, seconds = chosen(tmp_path, HF_HUB_OFFLINE="1")
    assert source == "sample"
    assert why == "the generator: the hub's TinyStories cannot be reached (HF_HUB_OFFLINE is set)"
    assert seconds < 0.5


def test_without_hub_and_cache_tinystories_ends_and_auto_goes_on(unreachable_hub: None) -> None:
    with pytest.raises(InputError) as error:
        TinyStories(TOKENIZER, data="tinystories")
    assert str(error.value) == (
        "data tinystories: roneneldan/TinyStories cannot be read (the hub cannot be reached and nothing is cached: "
        "HF_HUB_OFFLINE is set); give sample, or the path of a .txt, .jsonl or .parquet file"
    )
    assert torch.equal(next(TinyStories(TOKENIZER)), next(TinyStories(TOKENIZER, data="sample")))


def test_without_datasets_stories_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    why = "the generator: the hub's TinyStories needs datasets, which is not installed"
    assert choose_source("auto") == ("sample", why)
    with pytest.raises(InputError, match="data tinystories needs datasets: pip install datasets"):
        sources.open_source("tinystories", "train", seed=0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreachable_hub: None) -> Path:
    """The folder of the data set's revisions in the local cache, still empty."""
    snapshots = tmp_path / "cache" / "datasets--roneneldan--TinyStories" / "snapshots"
    snapshots.mkdir(parents=True)
    return snapshots


def put_revision(cache: Path, revision: str, texts: list[str]) -> Path:
    """A revision of one file a split; returns that of the train split."""
    (cache / revision / "data").mkdir(parents=True)
    for split in ("train", "validation"):
        path = cache / revision / "data" / f"{split}-00000-of-00001-0123456789abcdef.parquet"
        pq.write_table(pa.table({"text": texts}), path)
    return next((cache / revision / "data").glob("train*"))


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def replace_by(target: str) -> Callable[[Path], object]:
    def replace(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return replace


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def link_to_itself(file: Path) -> None:
    (file.parents[2] / "loop").symlink_to("loop")


BROKEN: dict[str, Callable[[Path], object]] = {
    "a link that leads nowhere": replace_by("/gone"),
    "a file cut short": cut_short,
    "an empty file": lambda file: file.write_bytes(b""),
    "a folder": replace_by_folder,
    "a pointer to a large file": lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"),
    "a revision that is a link to itself": link_to_itself,
    "no folder of revisions": lambda file: replace_by_file(file.parents[2]),
}


@pytest.mark.parametrize("how", BROKEN)
def test_auto_goes_on_without_a_cache_that_is_broken(how: str, cache: Path) -> None:
    BROKEN[how](put_revision(cache, "abc", TEXTS))
    source, why = choose_source("auto")
    assert source == "sample"
    assert why.startswith("the generator: the hub's TinyStories in the local cache cannot be read (")
    assert str(cache) in why
    with pytest.raises(InputError, match=r"^data tinystories: the hub's local cache cannot be read \("):
        sources.open_source("tinystories", "train", seed=0)


def choose_as_nobody(_: int, cache: str) -> tuple[str, str]:
    import datasets  # noqa: F401  # before its files cannot be read either
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = cache
    os.setuid(65534)
    return choose_source("auto")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_auto_goes_on_without_a_cache_that_may_not_be_read() -> None:
    """As after `docker run -u`, where HOME is root's."""
    with tempfile.TemporaryDirectory() as home:  # pytest's own folders are closed to others
        os.chmod(home, 0o755)
        (Path(home) / "hub").mkdir(mode=0o700)
        [(source, why)] = run_ranks(1, choose_as_nobody, f"{home}/hub")
    assert source == "sample"
    assert f"local cache cannot be read (Permission denied: {home}/hub/datasets--" in why


def test_a_revision_is_the_one_that_is_asked_for(cache: Path) -> None:
    identities = []
    for age, revision in enumerate(("abc", "def"), 1):  # the later is the newer
        put_revision(cache, revision, [f"{revision} {text}" for text in TEXTS] * age)
        os.utime(cache / revision, (0, age))
        identities.append(sources.source_identity("tinystories", "train", 0))
    assert identities[0] != identities[1]
    assert hub.hub_revision() == "def"
    loaders = [TinyStories(TOKENIZER, data="tinystories", revision=which) for which in (None, "abc", "def")]
    assert [TOKENIZER.decode(next(loader)[0])[:3] for loader in loaders] == ["def", "abc", "def"]
    with pytest.raises(InputError, match="its revision fff is not cached: HF_HUB_OFFLINE is set"):
        sources.open_source("tinystories", "train", 0, "fff")
