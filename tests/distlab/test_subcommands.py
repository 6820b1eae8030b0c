"""The subcommands of `distlab` and `./launch.sh`, and the earlier names of some of them."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from support.terminals import fork_python

from distlab.launch import launch
from distlab.settings.common import parse
from distlab.settings.training import TrainSettings
from distlab.subcommands import FUNCTIONS
from simplellm.errors import InputError


class Missing:
    """Python's look for a package that is not installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, *_: object) -> None:
        if name == self._package:
            raise ModuleNotFoundError(name=name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_says_how_it_is_called(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        launch([name, "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert shown.startswith(f"usage: ./launch.sh {'' if name == 'calibrate' else name}")


EXAMPLE = re.compile(r" *((?:python -m|distlab|\./launch\.sh) .*)")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_example_has_a_line_of_its_own(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        launch([name, "--help"])
    shown = [line.strip() for line in capsys.readouterr().out.splitlines()]
    module = importlib.import_module(FUNCTIONS[name].partition(":")[0])
    for line in (module.__doc__ or "").splitlines():
        if example := EXAMPLE.fullmatch(line):
            assert example[1] in shown


def test_calibrate_lists_first_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch(["calibrate", "--help"])
    flags = re.findall(r"^\W*(--[\w-]+)", capsys.readouterr().out, re.M)
    assert flags.index("--seconds") < flags.index("--seed") < flags.index("--dmodel")


def test_a_topology_may_follow_the_word_launch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        launch(["launch", "primer", "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ./launch.sh primer ")
    assert re.search(r"--resume DIR .*(\s.*){1,3}\(default: a new run\)", shown), "not None"


def test_help_of_a_lesson_lists_the_flags_of_the_scripts_that_run_instead(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch(["hybrid", "--help"])
    paragraphs = [" ".join(part.split()) for part in capsys.readouterr().out.split("\n\n")]
    of_5d = next(part for part in paragraphs if part.startswith("intro_5d.py runs instead with"))
    of_repair = next(part for part in paragraphs if part.startswith("intro_hybrid_repair.py runs instead"))
    assert {"--shard,", "--cp,", "--experts,"} < set(of_5d.split())
    assert "--micro-batches" not in of_5d  # hybrid has it
    assert set(re.findall(r"--[\w-]+", of_repair)) == {"--repair", "--compare-every", "--help"}


@pytest.mark.parametrize("module", ["plan", "calibrate", "collective_costs", "figures", "show_schedule"])
def test_earlier_names_still_work(module: str) -> None:
    ended = fork_python("-m", f"distlab.{module}", "--help").finish()
    assert ended.status == 0, ended.err
    assert ended.out.startswith("usage: ")


@pytest.mark.parametrize(
    "package",
    [
        "distlab_planner",
        "distlab_exercises",
        "distlab_page",
        "distlab_playground",
        "distlab_compare",
        "distlab_figures",
    ],
)
def test_what_a_missing_package_would_do_is_said_in_a_sentence(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(package), *sys.meta_path])
    of_package = [name for name, function in FUNCTIONS.items() if function.startswith(f"{package}.")]
    assert of_package
    for name in of_package:
        with pytest.raises(InputError, match=f"{name} needs the package {package}, which is not installed"):
            launch([name])
    file = tmp_path / "machine.json"
    file.touch()
    flags = {"distlab_planner": ["--machine", str(file)], "distlab_page": ["--page"]}.get(package)
    if flags is not None:
        with pytest.raises(InputError, match=f"{flags[0]} needs the package {package}"):
            parse(TrainSettings(), "", flags)


def test_another_package_that_is_missing_is_not_taken_for_that_of_the_subcommand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "distlab_figures.command", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing("distlab_figures.command"), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError):
        launch(["figures"])
