"""Ranks that save, check or read together: they wait for one that is at work, and name one that dies."""

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.chapters import MODEL, TRAINING, load, losses, train
from support.processes import free_port, process_group, run_group, run_ranks
from support.terminals import fork_launcher
from torch import Tensor

from distlab.checkpoints import saving
from distlab.checkpoints.format import RECORD, UNFINISHED, checksum_of, latest_valid, place_of
from distlab.checkpoints.slices import Slice, TensorBlock
from distlab.comm import together as rounds
from distlab.comm.context import context_of
from distlab.comm.together import texts_of_all, together
from distlab.comm.waits import TrafficError
from distlab.rendezvous.survivors import NewsError
from distlab.run.checkpointer import choose
from distlab.settings.common import parse
from simplellm.errors import InputError

TIMEOUT, LONG = 1.5, 1.8  # seconds
# What takes one of two ranks long while they resume and save, one after the other.
SLOW = {"format.checksum": 0, "saving.read_into": 0, "joining.content_of": 1}
SLOW |= {"writer.write_safetensors": 1, "saving._complete": 0}
SLOW_RANKS = f"""
import os, time
from distlab.checkpoints import format, saving, writer
from distlab.run import joining
from distlab.run.main import main
from support.chapters import load

script = load("DP/gradient_aggr/intro_DP_GA.py")
DEFAULTS = script.DEFAULTS

def slow(module, name):
    before = getattr(module, name)

    def slowly(*args, **options):
        if name != "checksum" or args[0].suffix == ".safetensors":
            time.sleep({LONG})
        return before(*args, **options)

    setattr(module, name, slowly)

if __name__ == "__main__":
    for function, rank in {SLOW}.items():
        module, name = function.split(".")
        if rank == int(os.environ["RANK"]):
            slow(globals()[module], name)
    main(script.train, DEFAULTS, "")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "run"
    port = ["--master-port", str(free_port())]
    flags = ["--world-size", "2", "--save-every", "2", "--out", str(out), *port]
    run_ranks(2, train, "DP/gradient_aggr/intro_DP_GA.py", flags)
    return out


def test_a_resume_and_a_save_may_take_one_rank_longer_than_the_timeout(saved: Path, tmp_path: Path) -> None:
    driver, out, started = tmp_path / "driver.py", tmp_path / "run", time.monotonic()
    driver.write_text(SLOW_RANKS)
    flags = ["--resume", saved, "--steps", "6", "--save-every", "6", "--timeout", str(TIMEOUT), "--out", out]
    ended = fork_launcher(driver, *MODEL, *TRAINING, "--world-size", "2", *flags).finish(60)
    assert ended.status == 0, ended.err
    assert time.monotonic() - started > LONG * len(SLOW), "they were slow"
    assert len(losses(out)) == 2
    assert latest_valid(out).step == 6


def at_work(rank: int, port: int, ends: str, seconds: float = 3) -> str:
    """Two ranks at work, of which rank 1 ends in some way while rank 0 is far from done: it takes so many seconds."""

    def work() -> str:
        if rank == 0:
            time.sleep(seconds)
        elif ends == "an error":
            raise OSError("no room")
        elif ends != "well":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL if ends == "killed" else signal.SIGSTOP)
        return f"rank {rank} is done"

    with process_group(rank, 2, port, timeout_seconds=1):
        try:
            return together("the test's work", work)
        except OSError as error:
            return str(error)
        except TrafficError as error:
            print(error)
            os._exit(3 if "the test's work" in str(error) else 4)


def test_all_ranks_leave_together_and_an_error_is_its_own_ranks() -> None:
    """They wait for longer than their timeout."""
    assert run_ranks(2, at_work, free_port(), "well", 1.2) == ["rank 0 is done", "rank 1 is done"]
    assert run_ranks(2, at_work, free_port(), "an error", 1.2) == ["rank 0 is done", "no room"]


@pytest.mark.parametrize("ends", ["killed", "stopped"])
def test_a_rank_that_ends_or_stops_is_found_while_others_work(ends: str) -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank \d died"):
        run_ranks(2, at_work, free_port(), ends)
    assert time.monotonic() - started < 3 + 5


@pytest.mark.parametrize("lost", [RuntimeError("Connection closed by peer"), NewsError("a rank has died")])
def test_a_rank_that_loses_another_ends_its_own_work_first(lost: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that ends in an exception which would end a thread."""
    ended = list[bool]()

    def work() -> None:
        time.sleep(0.1)
        ended.append(True)

    def lose(at_work: Tensor) -> None:
        if at_work:
            raise lost

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lose)
    with pytest.raises(type(lost), match=str(lost)):
        together("the test's work", work)
    assert ended
    monkeypatch.setattr(rounds, "SHORTEST_ROUND", 1.0)
    with pytest.raises(SystemExit):
        together("the test's work", sys.exit)


def tell(rank: int, text_of: Callable[[int], str]) -> list[str]:
    told = texts_of_all(text_of(rank), "the test's texts")
    pair = dist.new_group([0, 2])
    assert rank == 1 or texts_of_all(text_of(rank), "the texts of two", pair) == told[::2]
    assert {*context_of().ledger.sent_bytes} == {"control"}
    return told


@pytest.mark.parametrize("text_of", [lambda _: "", "from rank {}".format, lambda rank: "ü \0\udcff" * rank])
def test_texts_of_all_ranks(text_of: Callable[[int], str]) -> None:
    assert run_group(3, tell, text_of) == [[text_of(rank) for rank in range(3)]] * 3


def sees_only_its_own_files(rank: int, out: Path) -> str:
    """As two machines do without a shared folder: rank 1 writes somewhere else."""
    own = out if rank == 0 else out / "elsewhere"
    tensors = {"weight": Slice(torch.ones(3), [6], [TensorBlock((3 * rank,), (3,))])}  # a half of it
    record = {"step": 1, "tokens": 0, "model": {}, "settings": {}}
    try:
        saving.save(own, tensors, record, b"", keep=1)
    except InputError as error:
        return str(error)
    return ""


def test_half_a_checkpoint_is_not_declared_whole(tmp_path: Path) -> None:
    sentences = run_group(2, sees_only_its_own_files, tmp_path)
    assert sentences[0] == f"--out {tmp_path}: files of some ranks are missing; give a folder that all machines share"
    assert not (tmp_path / "checkpoints" / "step-00000001").exists()


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[str]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    record = {"step": 1, "tokens": 0, "model": {}, "settings": {}}
    saving.save(tmp_path, {"weight": torch.ones(3)}, record, b"a tokenizer", keep=1)
    unfinished, place = place_of(tmp_path, 1, UNFINISHED), place_of(tmp_path, 1)
    *before, last = map(Path, synced)
    assert {*before} == {unfinished, *(unfinished / path.name for path in place.iterdir())}
    assert last == place.parent


def resume_from_own_files(rank: int, runs: list[Path]) -> tuple[int, str]:
    """As two machines do without a shared folder, each of which has checkpoints of steps 2 and 4."""
    flags = ["--resume", str(runs[0]), "--world-size", "2", "--steps", "6"]
    settings = parse(load("DP/gradient_aggr/intro_DP_GA.py").DEFAULTS, "", flags)
    folders = [str(place_of(runs[rank], step)) for step in (4, 2)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        return choose(settings, folders, runs[0] / "further", None).step, said.getvalue()


def test_a_checkpoint_that_differs_between_hosts_is_skipped(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "of another host"
    shutil.copytree(saved, other)
    skipped = "# skipped a checkpoint: step-00000004: {}\n".format
    assert run_group(2, resume_from_own_files, [saved, other]) == [(4, ""), (4, "")]
    *_, second, _ = sorted(place_of(other, 4).iterdir(), key=lambda path: path.stat().st_size)
    second.write_bytes(bytes(second.stat().st_size))
    found = run_group(2, resume_from_own_files, [other, other])
    assert [step for step, _ in found] == [2, 2], "each rank reads some of the files"
    shutil.copy(place_of(saved, 4) / second.name, second)
    path = place_of(other, 4) / RECORD
    record = json.loads(path.read_text()) | {"torch": "of another run"}
    del record["sha256"]
    path.write_text(json.dumps(record | {"sha256": checksum_of(record)}))
    found = run_group(2, resume_from_own_files, [saved, other])
    assert found == [(2, skipped("its record differs between hosts")), (2, "")]


# Rank 1 dies as it has written its file of the second checkpoint, which is not on the disk yet.
DIES_AS_IT_SAVES = """
import os, signal
from support.chapters import load
from distlab.run.main import main

script = load("DP/gradient_aggr/intro_DP_GA.py")
DEFAULTS, fsync = script.DEFAULTS, os.fsync

def sync_or_die(descriptor):
    if os.environ["RANK"] == "1" and "step-00000004.unfinished" in os.readlink(f"/proc/self/fd/{descriptor}"):
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)

if __name__ == "__main__":
    os.fsync = sync_or_die
    main(script.train, DEFAULTS, "")
"""


def test_a_rank_that_dies_as_all_save_ends_the_run_and_takes_nothing_with_it(tmp_path: Path) -> None:
    driver, out = tmp_path / "driver.py", tmp_path / "run"
    driver.write_text(DIES_AS_IT_SAVES)
    flags = [*MODEL, *TRAINING, "--steps", "6", "--world-size", "3", "--save-every", "2", "--out", out]
    ended = fork_launcher(driver, *flags).finish(45)
    assert ended.status == 1
    assert ended.err.splitlines()[-1] == "# rank 1 was terminated by SIGKILL"
    assert "Traceback" not in ended.err
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"step-00000002", "step-00000004.unfinished"}
    said: list[str] = []
    assert latest_valid(out, said.append).step == 2
    assert said[0].startswith("skipped a checkpoint: step-00000004.unfinished is incomplete")
    run_ranks(1, train, "primer/intro.py", ["--resume", str(out), "--out", str(out), "--save-every", "2"])
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"step-00000002", "step-00000004"}
