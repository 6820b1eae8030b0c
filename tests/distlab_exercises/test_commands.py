"""The commands on exercises as a student and a teacher meet them."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import LAB

from distlab.launch import launch
from distlab_exercises.catalogue import EXERCISES
from distlab_exercises.skeleton import write_out
from simplellm.errors import InputError


def test_from_the_list_to_the_last_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["exercise"]) == 0
    listed = capsys.readouterr().out
    for name, exercise in EXERCISES.items():
        assert re.search(rf"^  {name} +{exercise.minutes} min  {re.escape(exercise.title)}$", listed, re.MULTILINE)
        assert launch(["exercise", name, str(tmp_path / name)]) == 0
        (path,) = (tmp_path / name).iterdir()
        assert f"./launch.sh check {path}" in capsys.readouterr().out
        text = path.read_text()
        compile(text, str(path), "exec")
        assert "[end]" not in text
        assert text.count(f"./launch.sh check {path}") == 1
        hints = []
        for number in range(1, len(exercise.hints) + 1):
            assert launch(["hint", name, str(number)]) == 0
            hints.append(capsys.readouterr().out)
        assert "the next one" in hints[0]
        assert "the next one" not in hints[-1]


@pytest.mark.parametrize("folder", ["my work", r"C:\new\users", 'three""" quotes', "it's"])
def test_the_commands_of_a_file_can_be_copied_whatever_its_folder_is_called(folder: str) -> None:
    path = Path(folder) / "intro_DP_GA.py"
    task = ast.get_docstring(ast.parse(write_out(EXERCISES["dp-ga"], path))) or ""
    for command in (["./launch.sh", "check", str(path)], ["./launch.sh", str(path)]):
        assert command in [
            shlex.split(line)[2:] for line in task.splitlines()[-6:] if line.startswith(("    check", "    run"))
        ]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("exercise dp-gaa my", "dp-gaa: no such exercise; there are dp-ga, "),
        ("exercise dp-ga", "give a folder for its file"),
        ("exercise dp-ga taken", "already exists, and may hold your work"),
        ("exercise pp-zb other", "holds the exercise pp-gpipe; give another folder, such as other/pp-zb"),
        ("exercise dp-ga taken/intro_DP_GA.py", "is not a folder"),
        ("hint dp-ga 9", "dp-ga has the hints 1 to 3"),
        ("hint dp-ga x", "./launch.sh hint: argument number"),
        ("check", "./launch.sh check: the following arguments are required"),
        ("check nothing.py", "nothing.py: does not exist"),
        ("check other.py", "does not say which exercise it solves; give --exercise, one of dp-ga"),
        ("check other/intro_DP_GA.py", "other/intro_DP_GA.py: dp-gaa: no such exercise"),
        ("check empty", "has no file of an exercise"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(
    command: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("taken", "empty", "other"):
        Path(folder).mkdir()
    Path("taken/intro_DP_GA.py").touch()
    Path("other.py").touch()
    Path("other/intro_DP_GA.py").write_text('"""Exercise dp-gaa: averages."""\n')
    Path("other/intro_PP_microbatches.py").write_text('"""Exercise pp-gpipe: the order."""\n')
    with pytest.raises(InputError, match=re.escape(sentence)):
        launch(command.split())


def test_a_folder_of_submissions_is_graded_by_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for student, solved in (("ada", True), ("bob", False)):
        path = tmp_path / student / "broadcast.py"
        path.parent.mkdir()
        path.write_text(write_out(EXERCISES["broadcast"], path, solved))
    (tmp_path / "notes.py").write_text("print('not an exercise')\n")
    (tmp_path / "intro_DP_GA.py").write_text("print('its first lines are gone')\n")
    (tmp_path / "bytes.py").write_bytes(b"\xff")
    assert launch(["check", "--json", str(tmp_path)]) == 1
    written = capsys.readouterr()
    assert [line.partition(": ")[0] for line in written.err.splitlines()] == [
        f"# skipped {tmp_path / name}" for name in ("bytes.py", "intro_DP_GA.py")
    ]
    ada, bob = [json.loads(line) for line in written.out.splitlines()]
    assert (ada["exercise"], ada["passed"]) == ("broadcast", True)
    assert ada["file"].endswith("ada/broadcast.py")
    assert bob["passed"] is False
    assert [trial["mistake"] for trial in bob["trials"]] == ["not-written"] * 3
    assert launch(["check", str(tmp_path / "ada")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "2 to 8 ranks" in line] == ["right"] * 3
    assert lines[-1] == "# passed"


def test_files_of_a_folder_that_do_not_say_their_exercise_are_of_the_one_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broadcast.py"
    path.write_text(write_out(EXERCISES["broadcast"], path, solved=True).partition('\n"""\n')[2])
    (tmp_path / "notes.py").write_text("print('not an exercise')\n")
    assert launch(["check", "--json", "--exercise", "broadcast", str(tmp_path)]) == 0
    (checked,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (checked["file"], checked["exercise"]) == (str(path), "broadcast")


@pytest.mark.parametrize("name", ["pp-gpipe", "pp-zb"])
def test_the_command_that_runs_a_file_runs_what_is_not_written_yet(name: str, tmp_path: Path) -> None:
    path = tmp_path / EXERCISES[name].file_name
    path.write_text(write_out(EXERCISES[name], path))
    [command] = re.findall(r"^    run it      \./launch\.sh (.+)$", path.read_text(), re.MULTILINE)
    flags = "--steps 1 --seq-len 16 --dmodel 16 --num-heads 2 --n-layers 3 --data sample --device cpu --micro-batches 3"
    run = subprocess.run(
        [sys.executable, "-m", "distlab.launch", *shlex.split(command), *flags.split(), "--out", tmp_path / "run"],
        env=os.environ | {"PYTHONPATH": str(LAB / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode != 0
    assert "NotImplementedError: write " in run.stderr


def test_exercises_are_written_without_torch() -> None:
    code = "import sys; from distlab.launch import launch; launch(['exercise']); sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": str(LAB / "src"), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL).returncode == 0
