"""The commands on exercises as a student and a teacher meet them."""

import ast
import csv
import errno
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import LAB
from support.terminals import fork_launcher

from distlab.launch import launch
from distlab.run.commands import launcher
from distlab_exercises.catalogue import EXERCISES
from distlab_exercises.commands import show
from distlab_exercises.skeleton import write_out
from distlab_exercises.submissions import exercise_of, handed_in, taken_from_the_lab
from distlab_exercises.verdict import Verdict
from simplellm.errors import InputError


def hand_in(path: Path, name: str, solved: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write_out(EXERCISES[name], path, solved), errors="replace")
    return path


def test_from_the_list_to_the_last_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["exercise"]) == 0
    listed = capsys.readouterr().out
    for name, exercise in EXERCISES.items():
        assert re.search(rf"^  {name} +{exercise.minutes} min  {re.escape(exercise.title)}$", listed, re.MULTILINE)
        page, chapter = exercise.chapter.split(", ")
        assert f"{chapter}: {page}" in listed[: listed.index(f"  {name} ")].split("\n\n")[-1], "listed by chapter"
        assert launch(["exercise", name, str(tmp_path / name)]) == 0
        (path,) = (tmp_path / name).iterdir()
        told = capsys.readouterr().out
        assert f"{launcher()} check {path}\n" in told
        assert f"{launcher()} hint {name}\n" in told
        text = path.read_text()
        compile(text, str(path), "exec")
        assert text.count(f"{launcher()} check {path}") == 1
        assert "\nMORE = " not in text, "a path from the chapter's folder"
        hints = []
        for number in range(1, len(exercise.hints) + 1):
            assert launch(["hint", name, str(number)]) == 0
            hints.append(capsys.readouterr().out)
        for number, told in enumerate(hints[:-1], 2):
            assert f"the next one: {launcher()} hint {name} {number}\n" in told
        assert "the next one" not in hints[-1]
        for number, (own, told) in enumerate(zip(exercise.hints, hints, strict=True), 1):
            assert " ".join(told.split()).startswith(f"{number} of {len(hints)}: {' '.join(own.split())}")


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
        ("exercise dp-ga", "my/dp-ga/intro_DP_GA.py: already exists, and may hold your work"),
        ("exercise dp-ga", "; give another folder, such as my/dp-ga-3"),
        ("exercise dp-ga taken", "may hold your work; give another folder, such as dp-ga-2"),
        ("exercise pp-dapple other", "holds the exercise pp-gpipe; give another folder, such as other/pp-dapple"),
        ("exercise dp-ga taken/intro_DP_GA.py", "is not a folder"),
        ("exercise dp-ga my/new.py", "my/new.py: is not a folder; give one"),
        ("hint dp-ga 0", "hint 0: dp-ga has the hints 1 to 3"),
        ("hint dp-ga 9", "dp-ga has the hints 1 to 3"),
        ("hint dp-ga x", "launch.sh hint: argument number"),
        ("check", "launch.sh check: the following arguments are required"),
        ("check nothing.py", "nothing.py: there is no such file; "),
        ("check other.py", "does not say which exercise it solves; give --exercise, one of dp-ga"),
        ("check other/intro_DP_GA.py", "other/intro_DP_GA.py: dp-gaa: no such exercise"),
        ("check empty", "has no file of an exercise"),
        ("grade empty", "has no file of an exercise"),
        ("grade alone --exercise dp-ga", "alone: has no file of dp-ga; "),
        ("grade nothing", "nothing: is not a folder; give that of the course"),
        ("grade . --at-once 0", "--at-once 0: give at least 1"),
        ("grade . --exercise dp-gaa", "dp-gaa: no such exercise; there are dp-ga, "),
        ("grade . --csv other.py", "other.py: cannot be written (File exists); give another file"),
        ("grade . --csv new --json none/all.json", "none/all.json: cannot be written (No such file or directory)"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(
    command: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("taken", "empty", "other", "alone", "my/dp-ga", "my/dp-ga-2"):
        Path(folder).mkdir(parents=True)
    Path("alone/mine.py").write_text('"""Exercise pp-gpipe: the order."""\n')
    Path("my/dp-ga/intro_DP_GA.py").touch()
    Path("taken/intro_DP_GA.py").touch()
    Path("other.py").touch()
    Path("other/intro_DP_GA.py").write_text('"""Exercise dp-gaa: averages."""\n')
    Path("other/intro_PP_microbatches.py").write_text('"""Exercise pp-gpipe: the order."""\n')
    with pytest.raises(InputError, match=re.escape(sentence)):
        launch(command.split())
    assert not Path("new").exists(), "the next try could not write it"


def test_a_folder_of_submissions_is_graded_by_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for student in ("ada", "bob"):
        hand_in(tmp_path / student / "broadcast.py", "broadcast")
    with (tmp_path / "bob/broadcast.py").open("a") as file:
        for name in ("broadcast_naive", "broadcast_tree"):  # as a skeleton has them
            file.write(f'def {name}(*_, **__):\n    raise NotImplementedError("write {name}")\n')
    (tmp_path / "notes.py").write_text("print('not an exercise')\n")
    (tmp_path / "intro_DP_GA.py").write_text("print('its first lines are gone')\n")
    (tmp_path / "bytes.py").write_bytes(b"\xff")
    assert launch(["check", "--json", str(tmp_path)]) == 1
    written = capsys.readouterr()
    assert [line.partition(": ")[0] for line in written.err.splitlines()] == [
        f"# skipped {tmp_path / name}" for name in ("bytes.py", "intro_DP_GA.py", "notes.py")
    ]
    ada, bob = [json.loads(line) for line in written.out.splitlines()]
    assert (ada["exercise"], ada["passed"]) == ("broadcast", True)
    assert ada["file"].endswith("ada/broadcast.py")
    assert 0 <= sum(trial["seconds"] for trial in ada["trials"]) <= ada["seconds"] + 0.1
    assert bob["passed"] is False
    assert [trial["mistake"] for trial in bob["trials"]] == ["not-written"] * 2 + [""]
    with (tmp_path / "ada/broadcast.py").open("a") as file:
        file.write("import distlab.pipeline.auto\n")
    assert launch(["check", str(tmp_path / "ada"), str(tmp_path / "bob")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "2 to 8 ranks" in line] == ["right"] * 3 + ["WRONG"] * 2 + ["right"]
    files, title = (tmp_path / name / "broadcast.py" for name in ("ada", "bob")), EXERCISES["broadcast"].title
    assert [line for line in lines if line.startswith("# /")] == [f"# {file}: broadcast, {title}" for file in files]
    imports = lines[lines.index("# passed") - 1]
    assert imports.startswith("# it imports of the lab, beyond what its exercise gives: ")
    assert imports.endswith(", distlab.pipeline.auto")
    assert lines[-2].startswith("# not yet: write broadcast_naive (line ")
    assert lines[-1] == "# 1 of 2 files passed"


def test_a_file_that_cannot_be_written_to_its_end_is_not_left_as_if_it_were_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(path: Path, text: str, **_: str) -> None:
        path.write_bytes(text[:100].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fill_the_disk)
    with pytest.raises(InputError, match=r"cannot write there \(No space left on device\); give another folder"):
        launch(["exercise", "dp-ga", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_files_of_a_folder_that_do_not_say_their_exercise_are_of_the_one_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broadcast.py"
    path.write_text(write_out(EXERCISES["broadcast"], path, solved=True).partition('\n"""\n')[2])
    (tmp_path / "notes.py").write_text("print('not an exercise')\n")
    assert launch(["check", "--json", "--exercise", "broadcast", str(tmp_path)]) == 0
    (checked,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (checked["file"], checked["exercise"]) == (str(path), "broadcast")


@pytest.mark.parametrize(("folder", "exercise"), [("my/pp-executor", "pp-executor"), ("mine", "pp-gpipe")])
def test_a_file_of_several_exercises_that_does_not_say_which_solves_that_of_its_folder_or_the_first(
    folder: str, exercise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hand_in(tmp_path / folder / "intro_PP_microbatches.py", "pp-executor")
    path.write_text(path.read_text().partition('\n"""\n')[2])
    assert exercise_of(path).name == exercise
    monkeypatch.chdir(path.parent)
    assert exercise_of(Path(path.name)).name == exercise


def test_exercises_are_written_where_git_does_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pp-gpipe", "pp-dapple", "pp-executor"):  # of one script
        assert launch(["exercise", name]) == 0
        path = Path("my", name, EXERCISES[name].file_name)
        assert path.read_text().startswith(f'"""Exercise {name}: ')
        assert subprocess.run(["git", "check-ignore", "-q", path], cwd=LAB).returncode == 0


SOLVED = write_out(EXERCISES["broadcast"], Path("broadcast.py"), solved=True)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + SOLVED.encode(),  # a byte-order mark, as Notepad writes
        SOLVED.replace("\n", "\r\n").encode(),
        b"# -*- coding: latin-1 -*-\n# Andr\xe9\n" + SOLVED.encode("latin-1", "replace"),
        SOLVED.replace('"""Exercise', "'''Exercise", 1).replace('\n"""\n', "\n'''\n", 1).encode(),
        SOLVED.replace('"""Exercise', 'r"""\nExercise', 1).encode(),
    ],
    ids=["byte-order mark", "line ends of Windows", "Latin-1", "other quotes", "first line empty"],
)
def test_a_file_says_its_exercise_however_an_editor_has_saved_it(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_bytes(content)
    assert launch(["check", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["exercise"] == "broadcast"


def test_a_course_has_a_row_for_each_student_and_exercise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    course = tmp_path / "course"
    hand_in(course / "ada/mine.py", "broadcast")  # renamed
    hand_in(course / "ada/schedules/gpipe.py", "pp-gpipe")
    hand_in(course / "bob/broadcast.py", "broadcast", solved=False)
    stolen = hand_in(course / "cem/broadcast.py", "broadcast", solved=False)
    text = stolen.read_text().replace("import torch", "from distlab.collectives import algorithms\nimport torch", 1)
    for name in ("naive", "tree", "ring"):
        own = f'raise NotImplementedError("write broadcast_{name}")'
        text = text.replace(own, f"algorithms.broadcast_{name}(tensor, src, endpoint)")
    stolen.write_text(text)
    kills = hand_in(course / "abe/my/pp-gpipe/intro_PP_microbatches.py", "pp-gpipe")  # its first lines are gone
    kills.write_text("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n")  # the process that checks it
    (course / "eva").mkdir()
    latin = course / os.fsdecode(b"J\xf6rg")  # a name in another encoding than UTF-8
    hand_in(latin / "gpipe.py", "pp-gpipe", solved=False)
    later = hand_in(course / "kim/broadcast.py", "broadcast", solved=False)
    later.write_text(later.read_text().replace("\n\n\n", "\n\n\n\n\n", 1))  # other numbers of lines
    (course / "bob/notes.ipynb").touch()
    (course / "bob/gpipe.py").write_text("def gpipe(): ...\n")
    for cache in ("__pycache__", "bob/.ipynb_checkpoints", "bob/__pycache__"):
        (course / cache).mkdir()
        (course / cache / "gpipe.py").write_text("def gpipe(): ...\n")
    table, record = tmp_path / "grades.csv", tmp_path / "grades.json"
    started = time.monotonic()
    assert launch(["grade", str(course), "--csv", str(table), "--json", str(record)]) == 1
    seconds, told = time.monotonic() - started, capsys.readouterr().out
    found = json.loads(record.read_text())
    assert max(grade["seconds"] for grade in found["grades"]) < seconds
    results = {(grade["student"], grade["exercise"]): (grade["result"], grade["mistake"]) for grade in found["grades"]}
    missing = {(student, "pp-gpipe"): ("missing", "") for student in ("bob", "cem", "eva")}
    assert results == missing | {
        ("ada", "broadcast"): ("passed", ""),
        ("ada", "pp-gpipe"): ("passed", ""),
        ("bob", "broadcast"): ("wrong", "not-written"),
        ("cem", "broadcast"): ("passed", ""),
        ("abe", "broadcast"): ("missing", ""),
        ("abe", "pp-gpipe"): ("wrong", "no-answer"),
        ("eva", "broadcast"): ("missing", ""),
        ("J\N{REPLACEMENT CHARACTER}rg", "broadcast"): ("missing", ""),
        ("J\N{REPLACEMENT CHARACTER}rg", "pp-gpipe"): ("wrong", "not-written"),
        ("kim", "broadcast"): ("wrong", "not-written"),
        ("kim", "pp-gpipe"): ("missing", ""),
    }
    assert [name for student, name in results if student == "ada"] == ["pp-gpipe", "broadcast"], "as in the course"
    imports = {(grade["student"], grade["exercise"]): grade["imports"] for grade in found["grades"]}
    assert imports["cem", "broadcast"] == ["distlab.collectives.algorithms"]
    assert imports["ada", "pp-gpipe"] == imports["bob", "broadcast"] == []
    assert [sentence.partition(": ")[0] for sentence in found["not_graded"]] == [
        str(course / "bob" / name) for name in ("gpipe.py", "notes.ipynb")
    ]
    assert {(each["exercise"], each["mistake"], each["files"], each["of"]) for each in found["misconceptions"]} == {
        ("broadcast", "not-written", 2, 4),
        ("pp-gpipe", "no-answer", 1, 3),
        ("pp-gpipe", "not-written", 1, 3),
    }
    most = found["misconceptions"][0]
    sentences = {each["student"]: each["sentence"] for each in found["grades"] if each["sentence"]}
    assert (most["exercise"], most["mistake"]) == ("broadcast", "not-written"), "the most frequent first"
    assert most["for_example"] == sentences["bob"] != sentences["kim"]
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert {(row["student"], row["exercise"]): (row["result"], row["mistake"]) for row in rows} == results
    assert {row["imports"] for row in rows if row["student"] == "cem"} == {"", "distlab.collectives.algorithms"}
    for (student, name), (result, _) in results.items():
        assert re.search(rf"^{student} +{name} +{result}", told, re.MULTILINE | re.IGNORECASE)
    assert f"# not graded: {course}/bob/notes.ipynb: is a notebook; a .py file can be checked" in told
    assert "# 2 of 4 files of broadcast: not-written: not written yet: write broadcast_naive" in told


def test_imports_that_the_file_of_an_exercise_does_not_have_are_told(tmp_path: Path) -> None:
    path = hand_in(tmp_path / "mine.py", "pp-gpipe")
    assert taken_from_the_lab(EXERCISES["pp-gpipe"], path) == []
    more = """import math, intro_DP_GA
from intro_PP_microbatches import run_program
from distlab.pipeline.schedules import gpipe
import distlab.pipeline.split as other
from mine import gpipe
solution = __import__("distlab.pipeline.auto")
"""
    path.write_text(path.read_text() + more)
    found = ["distlab.pipeline.auto", "distlab.pipeline.schedules.gpipe", "distlab.pipeline.split", "intro_DP_GA"]
    assert taken_from_the_lab(EXERCISES["pp-gpipe"], path) == [*found, "intro_PP_microbatches.run_program"]
    path.write_text("from distlab import")
    assert taken_from_the_lab(EXERCISES["pp-gpipe"], path) == [], "it cannot be read: another sentence says so"


def test_a_course_has_not_passed_while_a_file_is_missing_or_without_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bob").mkdir()
    other = hand_in(tmp_path / "ada/other.py", "broadcast")
    assert launch(["grade", str(tmp_path), "--exercise", "ep-permutation"]) == 1
    told = capsys.readouterr().out
    assert "# trying 0 files, " in told, "of the one"
    assert "# 0 of 2 passed" in told
    assert f"# not graded: {other}: is not asked for\n" in told
    other.unlink()
    (tmp_path / "bob").rmdir()
    path = hand_in(tmp_path / "ada/mine.py", "ep-permutation")
    monkeypatch.setattr("distlab_exercises.grading.SECONDS_BETWEEN_LINES", 0)
    assert launch(["grade", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "# trying 1 file, " in told
    assert "# 1 of 1\n" in told, "the progress"
    with monkeypatch.context() as judged:
        wrong = Verdict("train: dp 2", False, "summed", ["is 2 times too large", "its norm is 3"])
        judged.setattr("distlab_exercises.grading.check", lambda *_: [wrong])
        assert launch(["grade", str(tmp_path)]) == 1
    assert "# 1 of 1 file of ep-permutation: summed: is 2 times too large\n" in capsys.readouterr().out
    path.write_text(f"{path.read_text()}\nwhile True: ...\n")
    for student in ("bob", "cem"):
        (tmp_path / student).mkdir()
    monkeypatch.setattr("distlab_exercises.grading.SECONDS_BETWEEN_LINES", 0.3)
    monkeypatch.setattr("distlab_exercises.grading.SECONDS_OF_A_TRIAL", 0)
    assert launch(["grade", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "# 1 of 1 file of ep-permutation: no-end: the check did not come to an end, and was stopped" in told
    assert "# 1 of 1\n" in told
    assert "# 3 of 1\n" not in told, "at once after the second"


def test_no_more_files_are_checked_at_once_than_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = f"open({str(tmp_path / 'busy')!r}, 'x')\ntime.sleep(0.1)\nos.unlink({str(tmp_path / 'busy')!r})\n"
    for student in ("ada", "bob"):
        path = hand_in(tmp_path / f"course/{student}/mine.py", "ep-permutation")
        (path.parent / "beside.py").write_text("NAME = 'a module of the student'\n")
        begins = "import beside, os, sys, time\nassert sys.argv == [__file__]\n"
        path.write_text(f"{path.read_text()}\n{begins}{alone}")
    assert launch(["grade", str(tmp_path / "course"), "--at-once", "1"]) == 0
    assert "# trying 2 files, 1 at a time\n" in capsys.readouterr().out


def test_a_course_may_lie_in_a_hidden_folder(tmp_path: Path) -> None:
    hand_in(tmp_path / ".cache/course/ada/mine.py", "broadcast")
    assert [file.student for file in handed_in(tmp_path / ".cache/course")] == ["ada"]


def test_a_file_that_has_passed_is_told_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distlab_exercises.checker.check", lambda *_: [Verdict("train: dp 2", True)])
    monkeypatch.setattr("distlab_exercises.checker.prepare", lambda _: None)
    assert launch(["check", str(hand_in(tmp_path / "mine.py", "dp-ga"))]) == 0
    assert capsys.readouterr().out.endswith("# passed: it is the same training run\n")


def test_a_trial_is_shown_with_bytes_remarks_and_the_last_lines_that_were_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(
        Verdict("train: dp 2", False, "summed", ["a\nb"], {"activations": (3000, 2000)}, ["late"], ["rank 0: x"], 1.25)
    )
    assert capsys.readouterr().out.splitlines() == [
        "WRONG  train: dp 2  (1.2 s)",
        "       a",
        "       b",
        "       activations: 3 kB in a step over a network, of all ranks; 2 kB are needed",
        "       remark: late",
        "       | rank 0: x",
    ]


@pytest.mark.parametrize("name", ["pp-gpipe", "pp-zb"])
def test_the_command_that_runs_a_file_runs_what_is_not_written_yet(name: str, tmp_path: Path) -> None:
    path = hand_in(tmp_path / EXERCISES[name].file_name, name, solved=False)
    [command] = re.findall(r"^    run it      \./launch\.sh (.+)$", path.read_text(), re.MULTILINE)
    flags = "--steps 1 --seq-len 16 --dmodel 16 --num-heads 2 --n-layers 3 --data sample --device cpu --micro-batches 3"
    ended = fork_launcher(*shlex.split(command), *flags.split(), "--out", tmp_path / "run").finish()
    assert ended.status != 0
    assert "NotImplementedError: write " in ended.err


def test_exercises_are_written_without_torch() -> None:
    code = "import sys; from distlab.launch import launch; launch(['exercise']); sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": str(LAB / "src"), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL).returncode == 0
