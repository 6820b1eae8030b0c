"""The subcommands of `distlab` and `./launch.sh`, and the earlier names of some of them."""

import importlib
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.planner_machines import cluster
from support.terminals import fork_launcher, fork_python

from distlab.launch import find_script, launch
from distlab.settings.common import parse
from distlab.settings.scripts import read_script
from distlab.subcommands import FUNCTIONS
from distlab_planner.machine import write_machine
from simplellm.errors import InputError


class Missing:
    """Python's look for a package that is not installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, *_: object) -> None:
        if name == self._package:
            raise ModuleNotFoundError(name=name)


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Python unable to find a package, also for those beside the lab that import it."""
    for name in [name for name in sys.modules if name.startswith("distlab_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(package), *sys.meta_path])


EXAMPLE = re.compile(r" *((?:python -m|distlab|\./launch\.sh) .*)")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_says_how_it_is_called_with_a_line_for_each_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        launch([name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: ./launch.sh {'' if name == 'calibrate' else name}")
    lines = [line.strip() for line in shown.splitlines()]
    module = importlib.import_module(FUNCTIONS[name].partition(":")[0])
    for line in (module.__doc__ or "").splitlines():
        if example := EXAMPLE.fullmatch(line):
            assert example[1] in lines


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
    assert "RANK" not in shown, "which each rank has from the launcher"
    assert re.search(r"--resume DIR .*(\s.*){1,3}\(default: a new run\)", shown), "not None"
    with pytest.raises(SystemExit):
        parse(read_script(find_script("primer")[0]).defaults, "", ["--help"])
    assert re.search(r"^usage: .* RANK$", capsys.readouterr().out, re.M), "of the script itself"


@pytest.mark.parametrize(
    ("before", "then"), [(signal.SIG_DFL, signal.default_int_handler), (signal.SIG_IGN, signal.SIG_IGN)]
)
def test_ctrl_c_interrupts_a_subcommand_unless_it_is_ignored(before: Any, then: Any) -> None:
    """It has to end what it has started; in a script's background, Ctrl-C is for others."""
    own = signal.signal(signal.SIGINT, before)
    try:
        launch(["exercise"])
        assert signal.getsignal(signal.SIGINT) is then
    finally:
        signal.signal(signal.SIGINT, own)


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
def test_what_a_missing_package_would_do_is_said_in_a_sentence(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(package, monkeypatch)
    of_package = [name for name, function in FUNCTIONS.items() if function.startswith(f"{package}.")]
    assert of_package
    for name in of_package:
        with pytest.raises(InputError, match=f"{name} needs the package {package}, which is not installed"):
            launch([name])


@pytest.mark.parametrize(
    ("flag", "package"),
    [("--machine", "distlab_planner"), ("--page", "distlab_page"), ("--page", "distlab_planner")],
)
@pytest.mark.parametrize("is_launched", [True, False])
def test_a_run_ends_in_a_sentence_where_the_package_that_a_flag_needs_is_missing(
    flag: str, package: str, is_launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before its first step. The page also needs the planner."""
    if flag == "--page":
        pytest.importorskip("plotly")
    write_machine(cluster(device="cpu"), machine := tmp_path / "machine.json")
    flags = [flag, *([machine] if flag == "--machine" else []), "--data", "sample", "--out", tmp_path / "run"]
    without(package, monkeypatch)
    started = fork_launcher("primer", *flags) if is_launched else fork_python("primer/intro.py", "0", *flags)
    ended = started.finish()
    assert ended.status == 2, ended.err
    [told] = ended.err.splitlines()
    assert told.startswith(f"# {flag} needs the package {package}, which is not installed")
    assert not [line for line in ended.out.splitlines() if not line.startswith("#")]


def test_the_page_of_a_run_is_refused_in_a_sentence_without_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    without("distlab_planner", monkeypatch)
    ended = fork_launcher("page", "runs").finish()
    assert ended.status == 2, ended.err
    [told] = ended.err.splitlines()
    assert told.startswith("# page needs the package distlab_planner, which is not installed")


def test_another_package_that_is_missing_is_not_taken_for_that_of_the_subcommand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "distlab_figures.command", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing("distlab_figures.command"), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError):
        launch(["figures"])
