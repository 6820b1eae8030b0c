"""What a run says that can be done with it now: the commands are parsed, and those of a real run are run."""

import os
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from support.chapters import load
from support.processes import LAB, Ended, run
from support.terminals import fork_command

from distlab.run import commands
from distlab.run.commands import next_commands
from distlab.settings.common import parse

TINY = "--dmodel 16 --num-heads 2 --n-layers 1 --seq-len 32 --data sample --device cpu".split()
SAVE, LONGER, EACH = "save the model next time", "train longer", " (each rank likewise)"
DRAW = ["draw the loss", "see the run as a page"]
NEXT = (*DRAW, "tell a story", LONGER, "resume", SAVE)
GA, WA = "DP/gradient_aggr/intro_DP_GA.py", "DP/weight_aggr/intro_DP_WA.py"
SENTIMENT = "TP/sentiment/tp_tensor_parallel.py"


def told(out: str) -> dict[str, str]:
    """The commands among the lines of a run, by what they do."""
    pairs = (line[2:].partition(": ")[::2] for line in out.splitlines())
    return {what.partition(" (")[0]: command for what, command in pairs if what.startswith(NEXT)}


def typed(command: str, cwd: Path) -> Ended:
    """Run a command as in the shell in which the run was started: what launch.sh sets is not set there."""
    return run("env", "-u", "PYTHONPATH", "bash", "-c", command, cwd=cwd, deadline=180)


def test_the_commands_of_a_launched_run_work(tmp_path: Path) -> None:
    """They draw its loss, have it tell a story, and go on with it; and it has told one itself."""
    quickstart = [str(LAB / "launch.sh"), *"quickstart --world-size 1 --steps 3".split(), *TINY]
    first = fork_command(quickstart, partial(os.chdir, tmp_path)).finish(180)
    assert first.status == 0, first.err
    lines = first.out.splitlines()
    assert all(line.startswith("#") or line.split()[0] in ("0", "1", "2") for line in lines)
    (begin,) = [number for number, line in enumerate(lines) if line.startswith("# Once upon a time")]
    assert "parameters after 3 steps" in lines[begin - 1]
    after = told(first.out)
    assert list(after) == [*DRAW, "tell a story", "train longer"], first.out
    (folder,) = (tmp_path / "runs/intro_DP_GA").iterdir()
    assert f" {folder.relative_to(tmp_path)}" in after["draw the loss"], "as one would type it"

    drawn = typed(after["draw the loss"], tmp_path)
    assert drawn.status == 0, drawn.err
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    story = fork_command(shlex.split(after["tell a story"]), partial(os.chdir, tmp_path)).finish(180)
    assert story.status == 0, story.err
    assert story.out.splitlines()[1].startswith("Once upon a time")
    longer = fork_command(shlex.split(after["train longer"]), partial(os.chdir, tmp_path)).finish(180)
    assert longer.status == 0, longer.err
    assert [line.split()[0] for line in longer.out.splitlines() if not line.startswith("#")] == ["3", "4", "5"]
    assert "parameters after 6 steps" in longer.out


@pytest.fixture
def _by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a terminal in the lab's folder."""
    for name in (commands.LAUNCHED_AS, "TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(LAB)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def of(script: str, flags: str, saved: int | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a run in runs/a can be told to do, started with these flags."""
    monkeypatch.setattr(sys, "argv", [script, *shlex.split(flags)])
    settings = parse(load(script).DEFAULTS, "", shlex.split(flags))
    return dict(line.split(": ", 1) for line in next_commands(settings, LAB / "runs/a", saved))


def flags_of(command: str, script: str) -> str:
    """A command's flags; that it is one of Python and the script is checked."""
    interpreter, path, *flags = shlex.split(command)
    found = shutil.which(interpreter)
    assert found is not None
    assert Path(found).absolute() == Path(sys.executable), "also if it is given from the current folder"
    assert path == script
    return " ".join(flags)


@pytest.mark.usefixtures("_by_hand")
@pytest.mark.parametrize(
    ("script", "started", "saved", "what", "again"),
    [
        ("primer/intro.py", "", None, SAVE, "--save-every 1000"),
        ("primer/intro.py", "--steps 3", None, SAVE, "--steps 3 --save-every 1"),
        (
            "primer/intro.py",
            "--steps=300 --save-every 100",
            300,
            LONGER,
            "--save-every 100 --resume runs/a --steps 600",
        ),
        (WA, "0 --steps 30 --sync-every 4", None, SAVE + EACH, "0 --steps 30 --sync-every 4 --save-every 8"),
        ("primer/intro.py", "--save-every 100", None, SAVE, "--save-every 20"),
        ("primer/intro.py", "--save_every 100", None, SAVE, "--save-every 20"),
        ("primer/intro.py", "--save-every 100", 200, "resume", "--save-every 100 --resume runs/a"),
        ("primer/intro.py", "--save_every 9 --out runs/a", 27, "resume", "--save_every 9 --out runs/a --resume runs/a"),
        (GA, "0 --steps 4 --save-every 2", 4, LONGER + EACH, "0 --save-every 2 --resume runs/a --steps 8"),
        ("primer/mlp.py", "--save-every 500", 1000, LONGER, "--save-every 500 --resume runs/a --niters 2000"),
        (SENTIMENT, "0 --epochs 2 --save-every 9", 128, LONGER + EACH, "0 --save-every 9 --resume runs/a --epochs 4"),
    ],
)
def test_the_commands_of_a_run_by_hand(
    script: str, started: str, saved: int | None, what: str, again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(LAB / Path(script).parent)
    after = of(script, started, saved, monkeypatch)
    can_tell = ["tell a story"] * (saved is not None and "intro" in script)
    assert list(after) == [*DRAW, *can_tell, what]
    assert flags_of(after[what], script) == again
    without_resume = again.replace("--resume runs/a", "").split()
    parse(load(script).DEFAULTS, "", without_resume)


@pytest.mark.usefixtures("_by_hand")
def test_a_command_is_of_the_python_of_the_run_where_the_shell_finds_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("python", "python3"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    after = of("primer/intro.py", "--steps 3", None, monkeypatch)
    assert flags_of(after[SAVE], "primer/intro.py") == "--steps 3 --save-every 1"


@pytest.mark.usefixtures("_by_hand")
def test_the_commands_of_a_launched_run_are_those_that_it_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(commands.LAUNCHED_AS, "hybrid --dp 1 --pp 2 --steps 9 --tell 'Once, Tim said \"hi\"'")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "lab")
    after = of("hybrid/intro_hybrid.py", "--dp 1 --pp 2 --steps 9 --save-every 9", 9, monkeypatch)
    expected = "./launch.sh hybrid --dp 1 --pp 2 --tell 'Once, Tim said \"hi\"' --resume runs/a --steps 18"
    assert after["train longer"] == expected
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    after = of("hybrid/intro_hybrid.py", "--dp 1 --pp 2 --steps 9 --save-every 9", 9, monkeypatch)
    assert after["train longer (each machine with its own --node-rank)"] == expected


@pytest.mark.usefixtures("_by_hand")
def test_launch_sh_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(commands.LAUNCHED_AS, "primer")
    here = of("primer/intro.py", "--steps 9 --save-every 9", 9, monkeypatch)
    story = "--prompt 'Once upon a time' --temperature 0.5 --seed 1"
    assert here["draw the loss"] == "./launch.sh figures losses runs/a/losses.png runs/a"
    assert here["tell a story"] == f"./launch.sh tell runs/a {story}"
    monkeypatch.chdir(tmp_path)
    settings = parse(load("primer/intro.py").DEFAULTS, "", ["--save-every", "1000"])
    after = dict(line.split(": ", 1) for line in next_commands(settings, tmp_path / "my run", 1000))
    lab = shlex.quote(str(LAB))
    assert after == {
        "draw the loss": f"{lab}/launch.sh figures losses 'my run/losses.png' 'my run'",
        "see the run as a page": f"{lab}/launch.sh page 'my run'",
        "tell a story": f"{lab}/launch.sh tell 'my run' {story}",
        "resume": f"{lab}/launch.sh primer --resume 'my run'",
    }
    draw, *_ = next_commands(settings, tmp_path / "-dash", None)
    assert draw == f"draw the loss: {lab}/launch.sh figures losses ./-dash/losses.png ./-dash"


@pytest.mark.usefixtures("_by_hand")
def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    after = of(GA, "--world-size 2 --steps 4", None, monkeypatch)
    expected = f"torchrun --standalone --nproc-per-node 2 {GA} --world-size 2 --steps 4 --save-every 1"
    assert after["save the model next time"] == expected
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert list(of(GA, "--world-size 2 --steps 4", None, monkeypatch)) == DRAW
