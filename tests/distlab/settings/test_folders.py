"""A run's folder: what a run does not write into, and what it says that it replaces."""

import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.chapters import MODEL, TRAINING, train
from support.processes import run_ranks
from support.small_models import saved_model
from support.terminals import fork_python

from distlab.checkpoints.models import write_model
from distlab.run.starting import decide
from distlab.settings.common import parse
from distlab.settings.folders import Claim, check_out, write_config
from distlab.settings.training import TrainSettings
from simplellm.errors import InputError
from simplellm.export import export

OTHERS: dict[str, Callable[[Path], object]] = {
    "config.json": lambda folder: export(saved_model(), folder),
    "my_config.json": lambda folder: (folder / "my_config.json").write_text("{}"),
    "metrics.jsonl": lambda folder: (folder / "metrics.jsonl").write_text('{"loss": 1}\n'),
    "config.json ": lambda folder: (folder / "config.json").write_text("[]"),
    "config.json  ": lambda folder: (folder / "config.json").write_text('{"settings": {}}'),
    "thesis.tex": lambda folder: (folder / "thesis.tex").write_text("Abstract."),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_with_files_of_somebody_else_is_refused(name: str, tmp_path: Path) -> None:
    OTHERS[name](tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    sentence = f"--out {tmp_path}: has files that are not a run's, such as {name.strip()}; give a new folder\n"
    ended = fork_python("primer/intro.py", *MODEL, *TRAINING, "--out", tmp_path).finish()
    assert (ended.status, ended.out, ended.err) == (2, "", f"# {sentence}")
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_the_current_folder_counts_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thesis.tex").write_text("Abstract.")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^--out \.: has files that are not a run's, such as thesis\.tex; give"):
        parse(TrainSettings(), "", ["--out", "."])
    for ranks, is_run in ((0, False), (1, True)):
        write_config(tmp_path, {"settings": {}, "layout": {"dp": ranks}})
        with nullcontext() if is_run else pytest.raises(InputError, match=r"such as config\.json; give a new folder"):
            parse(TrainSettings(), "", ["--out", "."])


def test_an_empty_folder_is_fine_also_with_what_is_hidden_or_empty(tmp_path: Path) -> None:
    (tmp_path / ".notes").write_text("hidden")
    (tmp_path / "log.txt").touch()  # to which a shell directs the output of the run
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "rank2.log").write_text("# rank 2 failed\n")  # before there was a config.json
    parse(TrainSettings(), "", ["--out", str(tmp_path)])


def test_a_run_that_begins_while_its_folder_is_looked_at_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = os.listdir

    def begins_and_is_listed(folder: Path) -> list[str]:
        write_config(folder, {"settings": {}, "layout": {}})
        return listed(folder)

    monkeypatch.setattr(os, "listdir", begins_and_is_listed)
    check_out(tmp_path)
    assert listed(tmp_path) == ["config.json"]
    with (tmp_path / "config.json").open() as being_read:
        write_config(tmp_path, {"settings": {"steps": 3}, "layout": {}})
        assert json.load(being_read)["settings"] == {}, "a reader sees all of a file, or of the one before it"


def test_a_run_that_is_about_to_leave_its_folder_is_waited_for(tmp_path: Path) -> None:
    leaves = threading.Timer(0.1, Claim(tmp_path).release)
    leaves.start()
    Claim(tmp_path).release()
    leaves.join()


def test_where_folders_cannot_be_locked_a_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    Claim(tmp_path).release()


@pytest.mark.parametrize("args", [[""], ["--out", ""], ["--out="], ["--resume", ""], ["--data", ""], ["--tokenizer="]])
def test_a_variable_of_the_shell_that_is_not_set(args: list[str]) -> None:
    flag = args[0].rstrip("=") or "rank"
    with pytest.raises(InputError, match=f"^{flag} is given an empty value; is a variable of the shell not set"):
        parse(TrainSettings(), "", [*args, "--steps", "3"])


def test_an_earlier_runs_records_are_replaced_and_that_is_said(tmp_path: Path) -> None:
    flags = [*MODEL, *TRAINING, "--out", tmp_path]
    said = f"# the records of an earlier run in {tmp_path} are replaced\n"
    assert said not in fork_python("primer/intro.py", *flags).finish().out
    (tmp_path / "losses.png").write_text("drawn by the user")
    for name in ("trace.json", "recorded/step-00000001/rank0.safetensors"):  # as its flags have left them
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("of the earlier run")
    ended = fork_python("primer/intro.py", *flags, "--steps", "3").finish()
    assert ended.status == 0, ended.err
    assert said in ended.out
    assert json.loads((tmp_path / "config.json").read_text())["settings"]["steps"] == 3
    assert (tmp_path / "losses.png").exists()
    assert not (tmp_path / "trace.json").exists()
    assert not (tmp_path / "recorded").exists()


def test_a_run_that_goes_on_in_its_folder_replaces_nothing(tmp_path: Path) -> None:
    run_ranks(1, train, "primer/intro.py", ["--save-every", "2", "--out", str(tmp_path)])
    flags = ["--resume", tmp_path, "--steps", "6", "--out", tmp_path, "--record-gradients", "1"]
    ended = fork_python("primer/intro.py", *flags).finish()
    assert ended.status == 0, ended.err
    assert "are replaced" not in ended.out
    assert "\n# resume: " in ended.out, "from step 4: nothing was saved since"
    recorded = sorted(path.name for path in (tmp_path / "recorded").iterdir())
    assert recorded == ["step-00000004", "step-00000005"], "its first step, and the weights after it"


def test_a_run_that_goes_on_from_a_third_one_replaces_the_records_of_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    third, out = tmp_path / "third", tmp_path / "out"
    write_model(third, saved_model())
    unfinished = out / "checkpoints/step-00000009.unfinished"
    unfinished.mkdir(parents=True)
    for folder in (out, third):
        (folder / "recorded").mkdir(parents=True)
        write_config(folder, {"settings": {}, "layout": {}})
        flags = ["--resume", str(third), "--out", str(folder), "--data", "sample", "--save-every", "2"]
        decide(parse(TrainSettings(), "", flags), Path("intro.py"))[1].release()
        assert (folder / "recorded").exists() == (f"in {folder} are replaced" not in capsys.readouterr().out)
    assert [folder.name for folder in (out, third) if (folder / "recorded").exists()] == ["third"]
    assert not unfinished.exists()
