"""Ranks that would read different files, or run different code, do not begin."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from support.chapters import MODEL, load
from support.processes import LAB, free_port, run_ranks

from distlab.machine.devices import Place
from distlab.run import joining
from distlab.run.joining import content_of, identities, join, join_late
from distlab.run.starting import identity
from distlab.run.training import TrainingRun
from distlab.settings.common import RunSettings, parse
from distlab.settings.replicas import DataParallelSettings
from simplellm.dataloaders import TinyStories
from simplellm.errors import InputError
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

STORY = "Once upon a time there was a dog.\n<|endoftext|>\n"
STORIES = (STORY * 30_000).encode()
UNUSED = b"\xa0\x06\x00"  # a field of a tokenizer that means nothing
DAPPLE = "PP/microbatches/intro_PP_microbatches.py"


# A flag, the name of its file, and the contents for two ranks.
FILES = {
    "other only after a MiB": ("--data", "d.txt", [STORIES, STORIES[: -len(STORY)] + STORY.upper().encode()]),
    "a tokenizer": ("--tokenizer", "t.model", [SHIPPED_MODEL.read_bytes(), SHIPPED_MODEL.read_bytes() + UNUSED]),
}


def join_in_a_folder_of_ones_own(rank: int, folders: list[Path], out: Path, *flags: str) -> str:
    """As in terminals with different current folders: the sentence that ends the rank; "" if it could begin."""
    os.chdir(folders[rank])
    module = load(DAPPLE)
    try:
        TrainingRun(parse(module.DEFAULTS, "", [str(rank), *MODEL, *flags, "--out", str(out)]), LAB / DAPPLE).close()
    except InputError as error:
        return error.with_flags()
    return ""


@pytest.mark.parametrize("what", FILES)
def test_ranks_that_read_different_files_do_not_begin(what: str, tmp_path: Path) -> None:
    flag, name, contents = FILES[what]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, content in zip(folders, contents, strict=True):
        folder.mkdir()
        (folder / name).write_bytes(content)
    flags = [flag, name, *(["--data", "sample"] if flag != "--data" else []), "--world-size", "2"]
    flags += ["--master-port", str(free_port())]
    for sentence in run_ranks(2, join_in_a_folder_of_ones_own, folders, tmp_path / "out", *flags):
        assert sentence.startswith(f"{flag} {name}: " if flag == "--data" else f"{flag}: ")
        for rank, folder in enumerate(folders):
            assert f"rank {rank} has {folder / name} (SHA-256 " in sentence
        assert sentence.endswith("; give all ranks the same")
    assert not (tmp_path / "out").exists()


def test_ranks_that_read_equal_files_begin_wherever_these_are(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "d.txt").write_text(STORY * 40)
    flags = ["--data", "d.txt", "--world-size", "2", "--master-port", str(free_port())]
    assert run_ranks(2, join_in_a_folder_of_ones_own, folders, tmp_path / "out", *flags) == ["", ""]


def test_ranks_that_run_different_scripts_do_not_begin(tmp_path: Path) -> None:
    scripts = [tmp_path / str(rank) / "script.py" for rank in range(2)]
    for script in scripts:
        script.parent.mkdir()
        script.write_text("# a script\n")
    flags = ["--data", "sample", "--world-size", "2", "--master-port", str(free_port()), "--out", str(tmp_path / "out")]
    assert run_ranks(2, join_as, scripts, *flags) == ["", ""]
    scripts[1].write_text("# another script\n")
    flags[flags.index("--master-port") + 1] = str(free_port())
    for sentence in run_ranks(2, join_as, scripts, *flags):
        assert sentence.startswith(f"the script, with the modules beside it: rank 0 has {scripts[0]} (SHA-256 ")


def test_ranks_without_a_port_meet_at_that_which_help_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(_: int, host: str, port: int, __: float) -> None:
        raise InputError(f"{host}:{port}")

    monkeypatch.setattr("distlab.rendezvous.ranks.open_store", meet)
    for way in (join, join_late):
        with pytest.raises(InputError, match=r"^localhost:29500$"):
            way(parse(DataParallelSettings(), "", ["0"]), LAB / DAPPLE)


def join_as(rank: int, scripts: list[Path], *flags: str) -> str:
    """Join a run of another script than the other ranks."""
    try:
        join(parse(load(DAPPLE).DEFAULTS, "", [str(rank), *MODEL, *flags]), scripts[rank])
        dist.barrier()
    except InputError as error:
        return str(error)
    return ""


def test_the_code_is_that_of_the_packages_and_of_what_is_beside_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the script's path is given, and whatever else is there."""
    script, beside, package = tmp_path / "script.py", tmp_path / "model_of_mine.py", tmp_path / "distlab"
    in_package = tmp_path / "data_of_mine.py"
    for file in (script, beside, in_package):
        file.write_text("")
    (package / "run").mkdir(parents=True)
    (package / "run" / "steps.py").write_text("STEPS = 1\n")
    monkeypatch.setattr(joining, "PACKAGES", (package,))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(".")
    importlib.import_module("model_of_mine")
    monkeypatch.syspath_prepend(tmp_path.parent)
    importlib.import_module(f"{tmp_path.name}.data_of_mine")

    def digests(path: Path = script) -> tuple[str, ...]:
        joining.code_of_packages.cache_clear()
        return tuple(each["sha256"] for each in identities(RunSettings(), path).values())

    seen = {digests()}
    for change in (
        lambda: script.write_text("# other\n"),
        lambda: beside.write_text("# other\n"),
        lambda: in_package.write_text("# other\n"),
        lambda: (package / "run" / "steps.py").write_text("STEPS = 2\n"),
        lambda: (package / "run" / "steps.py").rename(package / "steps.py"),
        lambda: (package / "more.py").write_text(""),
    ):
        change()
        seen.add(digests())
        assert digests(Path("script.py")) == digests(Path("..", tmp_path.name, "script.py")) == digests()
    assert len(seen) == 7
    (tmp_path / "notes.txt").write_text("not code")
    (tmp_path / "scratch.py").write_text("not imported")
    (tmp_path / "json.py").write_text("nor this one, but Python's")
    assert digests() in seen


def test_the_content_of_a_folder_is_that_of_its_files_under_their_names(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a story")
    (tmp_path / "b").write_text("another")
    seen = {content_of(tmp_path)}
    (tmp_path / "b").rename(tmp_path / "c")
    seen.add(content_of(tmp_path))
    (tmp_path / "a").write_text("A story")
    seen.add(content_of(tmp_path))
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/d").write_text("one more")
    seen.add(content_of(tmp_path))
    (tmp_path / "inside").rename(tmp_path / "within")
    assert len({*seen, content_of(tmp_path)}) == 5


def test_a_schedule_of_ones_own_is_compared(tmp_path: Path) -> None:
    """Or one rank would take the gradients of a micro-batch for those of another."""
    own = (LAB / "examples/own_schedule.py").read_text()
    found = []
    for number, text in enumerate((own, f"{own}# changed\n", own)):
        path = tmp_path / str(number) / "own_schedule.py"
        path.parent.mkdir()
        path.write_text(text)
        settings = parse(load(DAPPLE).DEFAULTS, "", ["0", *MODEL, "--schedule", str(path), "--data", "sample"])
        found.append(identities(settings, tmp_path / "script.py")[f"--schedule {path}"]["sha256"])
    assert found[0] == found[2] != found[1]


def train_from_own_cache(rank: int, caches: list[str], out: Path, *flags: str) -> str:
    """The first story that a rank reads from a cache of the hub of its own, without a network."""
    from huggingface_hub import constants

    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = caches[rank], True
    module = load("DP/gradient_aggr/intro_DP_GA.py")
    settings = parse(module.DEFAULTS, "", [str(rank), *MODEL, *flags, "--out", str(out)])
    run: TrainingRun[Any] = TrainingRun(settings, LAB / "intro_DP_GA.py")
    tokens = SPTokenizer()
    try:
        batch: torch.Tensor = next(TinyStories(tokens, **run.data_options()))
    except InputError as error:
        return error.with_flags()
    finally:
        dist.barrier()  # no rank leaves another that has yet to connect
    return tokens.decode(batch[0])[:3]


@pytest.mark.parametrize("data", ["tinystories", "auto"])
def test_all_ranks_read_the_revision_that_rank_0_has(data: str, tmp_path: Path) -> None:
    caches = []
    for rank, revisions in enumerate([["abc"], ["abc", "def"], ["def"]]):  # the later is the newer
        snapshots = tmp_path / str(rank) / "datasets--roneneldan--TinyStories" / "snapshots"
        for age, revision in enumerate(revisions):
            (snapshots / revision).mkdir(parents=True)
            for split in ("train", "validation"):
                table = pa.table({"text": [f"{revision} is a long story about a dog and a cat and a bird."] * 40})
                pq.write_table(table, snapshots / revision / f"{split}-00000-of-00001-0.parquet")
            os.utime(snapshots / revision, (0, age))
        caches.append(str(tmp_path / str(rank)))
    flags = ["--data", data, "--world-size", "3", "--master-port", str(free_port())]
    told = run_ranks(3, train_from_own_cache, caches, tmp_path / "out", *flags)
    assert told[:2] == ["abc", "abc"]
    assert told[2].startswith("--data tinystories: ")
    assert "its revision abc is not cached: HF_HUB_OFFLINE is set" in told[2]


class AskedError(Exception):
    """What a device was asked for: its type, and the number of ranks here."""


@pytest.fixture
def _asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(name: str, ranks_here: int) -> str:
        raise AskedError(name, ranks_here)

    monkeypatch.setattr("distlab.machine.devices.pick_device_type", note)


@pytest.mark.usefixtures("_asks")
@pytest.mark.parametrize(("gpus", "device_type"), [(["x"], "cuda"), ([], "cpu")])
def test_a_spare_computes_on_the_device_of_the_rank_before_it(
    gpus: list[str], device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    store.set("verdict", '{"decided": {}}')
    for rank in range(3):
        store.set(f"place/{rank}", json.dumps(["here", gpus]))
    monkeypatch.setattr("distlab.rendezvous.ranks.open_store", lambda *_: store)
    with pytest.raises(AskedError, match=rf"\('{device_type}', 3\)"):
        join_late(parse(DataParallelSettings(), "", ["1", "--world-size", "3"]), LAB / DAPPLE)


@pytest.mark.usefixtures("_asks")
@pytest.mark.parametrize(("address", "here"), [("localhost", 3), ("127.0.0.1", 3), ("10.0.0.9", 1)])
def test_ranks_without_a_launcher_are_all_on_the_host_of_rank_0_if_that_is_this_one(
    address: str, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(AskedError, match=rf", {here}\)$"):
        join(parse(DataParallelSettings(), "", ["1", "--world-size", "3", "--master-addr", address]), LAB / DAPPLE)


@pytest.mark.parametrize(
    ("places", "told"),
    [
        (["A", "A", "B"], "ranks 0 and 2 are on A and B"),
        (["A with a GPU"] * 3, "this run computes on GPUs, and only ranks on the CPU share memory"),
    ],
)
def test_ranks_that_have_no_memory_in_common_do_not_begin_to_share_it(
    places: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = "distlab.rendezvous.ranks"
    monkeypatch.setattr(f"{ranks}.open_store", lambda *_: dist.HashStore())
    met = [Place(name[0], ("x",) * ("GPU" in name)) for name in places]
    monkeypatch.setattr(f"{ranks}.read_places", lambda *_: met)
    monkeypatch.setattr(f"{ranks}.agree", lambda _store, _rank, _size, _place, _same, decide, _seconds: decide())
    with pytest.raises(InputError, match=f"^--transport shared: {told}"):
        join(parse(DataParallelSettings(), "", "0 --world-size 3 --transport shared".split()), LAB / DAPPLE)


def test_flags_that_contradict_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    for flags, told in (
        ("--world-size 2", "--world-size 2: torchrun started 3 ranks"),
        ("0", "rank 0: torchrun made this process rank 1"),
    ):
        with pytest.raises(InputError, match=f"^{told}"):
            identity(parse(DataParallelSettings(), "", flags.split()))
    assert identity(parse(DataParallelSettings(), "", ["1"])) == identity(DataParallelSettings()) == (1, 3)
