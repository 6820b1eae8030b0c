"""Tokens that are encoded once: the same sequences as without files, whatever happens to the files."""

import errno
import fcntl
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import LAB, meeting_of, run_ranks
from support.story_files import write_documents
from support.terminals import CLONE_NEWNS, fork_command, unshare

from simplellm.dataloaders import TinyStories
from simplellm.errors import InputError
from simplellm.sources import open_source, source_identity
from simplellm.stories import story
from simplellm.token_chunks import TokenChunks
from simplellm.token_files import HEAD
from simplellm.tokenizers import SPTokenizer

TOKENIZER = SPTokenizer()
SMALL = {"GROUP": 8, "MOST": 150, "FIRST": 40}  # so that few documents have many chunks
STORIES = [" ".join(story(index).split()[: 3 + index * 7 % 40]) for index in range(45)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SIMPLELLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(f"simplellm.token_chunks.{name}", value)
    monkeypatch.setattr("simplellm.tokenizers.PART_CHARACTERS", 300)


def stream(data: str, split: str, skip: int) -> Iterator[tuple[int, int, int]]:
    """Each token with its document and its number in it, encoded as the documents come from the source."""
    source = open_source(data, split, 0)
    passes = itertools.chain.from_iterable(source.read(0) for _ in itertools.count())
    for document, text in enumerate(itertools.islice(passes, skip, None), skip):
        for offset, token in enumerate([*TOKENIZER.encode(text), TOKENIZER.eos_id]):
            yield document, offset, token


def tokens_in(path: Path) -> int:
    return int(HEAD.unpack_from(path.read_bytes())[9])


def files_of(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*.tokens") if tokens_in(path))


def first_of(files: list[Path]) -> Path:
    return min(files, key=lambda path: int(path.name.partition("-")[0]))


DATA = {  # name of the file, and its documents
    "text": ("stories.txt", STORIES),
    "lines": ("stories.jsonl", ["", *STORIES, "a"]),
    "parquet": ("stories.parquet", STORIES),
    "groups": ("groups.jsonl", STORIES[:25]),  # 24 for training: the last chunk is full
    "long": ("long.txt", [" ".join(STORIES) * 3, *STORIES[:3]]),
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("skip", [0, 3, 70])
@pytest.mark.parametrize("name", ["sample", *DATA])
def test_the_sequences_are_those_of_the_documents(name: str, skip: int, tmp_path: Path, cache: Path) -> None:
    data = "sample" if name == "sample" else str(write_documents(tmp_path / DATA[name][0], DATA[name][1]))
    batch, seq, steps = 3, 37, 60
    wanted = list(islice(stream(data, "train", skip), batch * seq * (steps + 1)))
    ids = torch.tensor([token for *_, token in wanted]).view(-1, batch, seq)

    def check(loader: TinyStories, first: int, steps: int, rank: int = 0, rows: int = batch) -> None:
        for step in range(first, first + steps):
            document, offset, _ = wanted[step * batch * seq]
            assert loader.state_dict() == {"document": document, "offset": offset}
            assert torch.equal(next(loader), ids[step, rank * rows : (rank + 1) * rows])

    def loader(rows: int = batch, rank: int = 0, at: int | None = None) -> TinyStories:
        new = TinyStories(TOKENIZER, rows, seq, skip, data=data, rank=rank, num_replicas=batch // rows)
        if at is not None:
            document, offset, _ = wanted[at * batch * seq]
            new.load_state_dict({"document": document, "offset": offset})
        return new

    check(loader(), 0, steps)  # encodes
    there = files_of(cache)
    assert len(there) > 5
    check(loader(), 0, steps)
    check(loader(rows=1, rank=2), 0, steps, rank=2, rows=1)
    for step in range(1, steps, 7):
        check(loader(at=step), step, 2)
    assert files_of(cache) == there, "nothing is encoded a second time"
    shutil.rmtree(cache)
    for step in range(steps - 1, 0, -7):
        check(loader(at=step), step, 2)


def test_tokens_of_a_large_vocabulary_have_32_bits(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = next(TinyStories(TOKENIZER, data="sample"))
    tokenizer = SPTokenizer()
    tokenizer.vocab_size, tokenizer.identity = 2**16 + 1, "another"
    assert torch.equal(next(TinyStories(tokenizer, data="sample")), before)
    sizes = [path.stat().st_size for path in files_of(cache)]
    assert len(sizes) == 2
    assert 1.8 < max(sizes) / min(sizes) < 2.1


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2 * tokens_in(path)] ^= 1  # of the first token
    path.write_bytes(content)


def flip_last(path: Path) -> None:
    """Of another piece of the tokens."""
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def flip_in_ends(path: Path) -> None:
    """Where a document ends."""
    content = bytearray(path.read_bytes())
    content[HEAD.size] ^= 1
    path.write_bytes(content)


def flip_in_head(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[28] ^= 1  # of the end
    path.write_bytes(content)


def overwrite(path: Path) -> None:
    path.write_text("something else\n" * 20)


def replace_by_another(path: Path) -> None:
    """By the file of the same documents of another seed."""
    next(TinyStories(TOKENIZER, data="sample", seed=1))
    [other] = [file for file in path.parents[1].rglob(path.name) if file != path]
    other.replace(path)


def replace_by_the_next(path: Path) -> None:
    """By the file of later tokens of the same documents."""
    list(islice(TokenChunks(TOKENIZER, "sample", "train", 0, None).walk(0, 0), 2))
    [other] = [file for file in path.parent.glob("*.tokens") if file != path]
    other.replace(path)


DAMAGES = (
    replace_by_another,
    replace_by_the_next,
    shorten,
    empty,
    flip,
    flip_last,
    flip_in_head,
    flip_in_ends,
    overwrite,
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_file_is_encoded_again(damage: object, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = next(TinyStories(TOKENIZER, 20, data="sample"))  # of two files, the first in two pieces
    path = first_of(files_of(cache))
    content = path.read_bytes()
    assert not capsys.readouterr().err, "no file is not a broken one"
    damage(path)  # type: ignore[operator]
    assert torch.equal(next(TinyStories(TOKENIZER, 20, data="sample")), wanted)
    assert capsys.readouterr().err == f"# {path} is broken: its tokens are encoded again\n"
    assert path.read_bytes() == content


class Shouting(SPTokenizer):
    def encode(self, text: str) -> list[int]:
        return super().encode(text.upper())


def test_a_tokenizer_derived_from_the_shipped_one_is_another(cache: Path) -> None:
    next(TinyStories(TOKENIZER, data="sample"))
    ids = next(TinyStories(Shouting(), data="sample"))[0]
    assert TOKENIZER.decode(ids) in story(0).upper()
    assert len(files_of(cache)) == 1


@pytest.mark.parametrize("damage", [None, flip])
def test_files_may_be_deleted_while_they_are_used(
    damage: Callable[[Path], None] | None, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a broken one, before its tokens have been checked."""
    wanted = list(islice(TinyStories(TOKENIZER, data="sample"), 40))
    files = files_of(cache)
    if damage is not None:
        damage(first_of(files))
    loader = TinyStories(TOKENIZER, data="sample")
    shutil.rmtree(cache)
    assert torch.equal(torch.stack(list(islice(loader, 40))), torch.stack(wanted))
    assert capsys.readouterr().err == ""
    assert len(files_of(cache)) == len(files) - 1, "the first was in use already"


def test_a_file_that_cannot_be_read_is_not_called_broken(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another user, for example."""
    wanted = next(TinyStories(TOKENIZER, data="sample"))
    [path] = files_of(cache)
    open_file = Path.open

    def opened(file: Path, *arguments: Any, **options: Any) -> Any:
        if file == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(file, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert torch.equal(next(TinyStories(TOKENIZER, data="sample")), wanted)
    assert capsys.readouterr().err == ""


def encode_beside_others(rank: int, begin: Barrier) -> tuple[int, int]:
    """The sum of all ids of 60 batches, and how many of their tokens this process has encoded itself."""
    encode, counts = SPTokenizer.encode_part, list[int]()

    def counting(*arguments: Any) -> tuple[list[int], int]:
        ids, end = encode(*arguments)
        counts.append(len(ids) + 1)
        return ids, end

    SPTokenizer.encode_part = counting  # type: ignore[method-assign, assignment]
    loader = TinyStories(SPTokenizer(), 8, 256, data="sample")
    begin.wait(20)
    return sum(int(next(loader).sum()) for _ in range(60)), sum(counts)


def test_processes_that_start_together_encode_once(cache: Path) -> None:
    totals, counts = zip(*run_ranks(3, encode_beside_others, meeting_of(3)), strict=True)
    assert len(set(totals)) == 1
    assert sum(counts) == sum(map(tokens_in, files_of(cache))) > 60 * 8 * 256


def test_a_stuck_process_does_not_stop_others(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplellm.token_files.SECONDS_FOR_A_CHUNK", 0.1)
    wanted = next(TinyStories(TOKENIZER, data="sample"))
    [path] = files_of(cache)
    path.unlink()
    with path.with_name("lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert torch.equal(next(TinyStories(TOKENIZER, data="sample")), wanted)
    assert files_of(cache) == [path]


def test_tokens_are_kept_where_files_cannot_be_locked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    next(TinyStories(TOKENIZER, data="sample"))
    assert files_of(cache)


def test_the_cache_is_where_the_user_has_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIMPLELLM_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, place in ((str(tmp_path / "own"), "own"), ("", ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        next(TinyStories(TOKENIZER, data="sample"))
        assert files_of(tmp_path / place / "simplellm")


@pytest.mark.parametrize("value", ["", "relative", "{place}/file/cache", "{place}/link"])
def test_without_a_cache_tokens_stay_in_memory(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = next(TinyStories(TOKENIZER, data="sample"))
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SIMPLELLM_CACHE", value.format(place=tmp_path))
    assert torch.equal(next(TinyStories(TOKENIZER, data="sample")), wanted)
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "file", "link"}, "nowhere else"


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs a mount namespace",
)
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    mount = partial(unshare, CLONE_NEWNS, "mount --make-rprivate /", f"mount -t tmpfs -o size=8k none {disk}")
    command = f"launch.sh dp-ga --world-size 2 --batch-size 2 --steps 2 --data sample --out {tmp_path}/run".split()
    ended = fork_command(command, mount, SIMPLELLM_CACHE=f"{disk}/cache").finish()
    assert ended.status == 2
    wanted = rf"# rank \d failed: cannot write {tmp_path}/disk/cache/tokens/\S+ \(No space left on device\); make room"
    assert re.fullmatch(wanted, ended.err.splitlines()[-1]), ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("operation", ["open", "replace"])
def test_a_file_that_cannot_be_put_in_its_place_leaves_nothing(
    operation: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    TinyStories(TOKENIZER, data="sample")  # once, so that only the file of tokens is still to be opened
    shutil.rmtree(cache)
    monkeypatch.setattr(Path, operation, fail)
    with pytest.raises(OSError, match="No space left"):
        TinyStories(TOKENIZER, data="sample")
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["lock"]


def test_an_edited_file_is_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stories.txt"
    path.write_text("One two.")
    first = next(TinyStories(TOKENIZER, seq_l=8, data=str(path)))
    path.write_text("One six.")
    assert not torch.equal(next(TinyStories(TOKENIZER, seq_l=8, data=str(path))), first)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = source_identity("~/stories.txt", "train", 0)
    assert before == source_identity(str(path), "train", 0)
    assert before != source_identity(str(shutil.copy2(path, tmp_path / "stories.jsonl")), "train", 0)
    os.utime(path, ns=(0, 0))  # as after a change beyond the first MiB
    assert source_identity(str(path), "train", 0) != before


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("later", [STORIES[::-1], []], ids=["reversed", "emptied"])
def test_a_file_that_changes_during_a_run_is_named(later: list[str], tmp_path: Path) -> None:
    path = write_documents(tmp_path / "stories.jsonl", STORIES)
    loader = TinyStories(TOKENIZER, 1, 16, data=str(path))
    next(loader)
    write_documents(path, later)
    with pytest.raises(InputError, match=r"^data .*stories.jsonl: changed while it was read; start the run again$"):
        list(islice(loader, 50))


def encode_with(rank: int, package: Path) -> None:
    """Encode the first chunk of the stories with another copy of the package."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "simplellm"]:
        del sys.modules[name]
    sys.path.insert(0, str(package.parent))
    import simplellm.token_chunks as copy

    assert copy.__file__.startswith(str(package))
    tokenizer = copy.SPTokenizer()
    assert next(copy.TokenChunks(tokenizer, "sample", "train", 0, None).walk(0, 0))


def test_tokens_are_of_the_code_and_the_words_that_made_them(tmp_path: Path, cache: Path) -> None:
    package = Path(shutil.copytree(LAB / "src/simplellm", tmp_path / "simplellm"))
    for count, file in enumerate(("", "story_data/words.txt", "tokenizers.py", "sources/text.py"), 1):
        if file:
            with (package / file).open("a") as changed:
                changed.write("\n# changed\n")
        run_ranks(1, encode_with, package)
        assert len(files_of(cache)) == count, file
    run_ranks(1, encode_with, package)
    assert len(files_of(cache)) == count


def test_data_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    path.symlink_to("/proc/self/mem")  # opens, but its first page is not there
    with pytest.raises(InputError, match=rf"^data {path}: cannot be read \(Input/output error\)"):
        TinyStories(TOKENIZER, data=str(path))
