"""The lessons: their numbers are those of the records, their commands run, and what a class hands in is checked."""

import html
import json
import re
import shlex
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import pytest
from support.notebooks import MARIMO, outputs
from support.processes import free_port
from support.terminals import fork_launcher

from distlab.run.commands import LAB
from distlab.subcommands import FUNCTIONS, run_subcommand
from distlab_page.records import read
from distlab_playground import lessons
from distlab_playground.answers import Request, check, verdicts
from distlab_playground.command import apps
from distlab_playground.lessons import (
    LESSONS,
    Answers,
    Lesson,
    Outcome,
    Question,
    all_lessons,
    read_answers,
)
from simplellm.errors import InputError

LESSON = Lesson(
    name="small",
    title="",
    about="",
    commands={"plan": "show-schedule gpipe --stages 3 --micro-batches 6"},
    questions=(
        Question("bubble", "", lambda runs: runs["plan"].printed(r"formula .*: ([\d.]+)%"), "", tolerance=0.05),
        Question("ticks", "", lambda runs: runs["plan"].printed(r"(\d+) ticks"), "", tolerance=0, least=2),
    ),
)


def outcome(folder: Path, losses: list[float], scale: int) -> Outcome:
    """Of a run of two ranks: rank 0 sends a message in each of two steps, rank 1 two of them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"settings": {}, "layout": {"dp": 2}}))
    steps = [
        json.dumps({"step": step, "loss": loss, "seconds": 1.0, "expert_loads": [[3 + step, 1]]})
        for step, loss in enumerate(losses)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(steps) + "\n")
    to = {"way": "send", "peers": [1], "messages": 1}
    ways = [{"kind": "gradients", "bytes": 50 * scale, **to}] * 2  # of two groups
    other = {"kind": "loss", "bytes": 1, **to}
    more = {"steps": 2, "seconds": 1.0, "waited_seconds": 0.0, "collective_seconds": 0.0}
    accounts = [{"name": f"rank {r}", "rank": r, **more, "sent": [*ways, other][: 3 - r]} for r in (0, 1)]
    (folder / "ledger.json").write_text(json.dumps(accounts))
    (folder / "memory.json").write_text(json.dumps([{"activations": 8 * scale}, {"activations": 1}]))
    return Outcome("", read(folder))


def test_numbers_are_read_from_the_records(tmp_path: Path) -> None:
    a, b = outcome(tmp_path / "a", [3.0, 2.0], 1), outcome(tmp_path / "b", [3.0, 1.5], 3)
    assert b.sent("gradients") == 150
    assert b.messages("gradients") == 1
    assert a.ranks_that_send("gradients", "loss") == 1
    assert (a.held("activations"), b.held("activations")) == (8, 24)
    assert (a.loss, b.loss) == (2.0, 1.5), "in the last step"
    assert a.load == 4 / 2.5, "in the last step"
    with pytest.raises(InputError, match="a: rank 0 sent no weights"):
        a.sent("weights")
    with pytest.raises(InputError, match="ticks is not in the output: it has 24"):
        Outcome("it has 24").printed("ticks")


def test_a_lesson_runs_its_commands_and_its_answers_are_judged(tmp_path: Path) -> None:
    here = LESSON.measured(LESSON.run())
    assert here == {"bubble": 25, "ticks": 24}
    answers = Answers("small", "ada", {"bubble": 26, "ticks": 21}, here)
    columns = [line.split() for line in verdicts(LESSON, answers, here)]
    assert columns == [["small", "ada", "bubble", "26", "25", "right"], ["small", "ada", "ticks", "21", "24", "off"]]
    assert LESSON.questions[1].is_right(22, 24), "up to the least difference that counts"
    usual = Question("", "", lambda _: 1.0, "")
    assert [usual.is_right(guess, 1.0) for guess in (1.02, 0.97)] == [True, False]
    other = replace(answers, guesses={"ticks": 26}, measured={"bubble": 20})
    columns = [line.split(maxsplit=5)[3:] for line in verdicts(LESSON, other, here)]
    assert columns == [["-", "20", "not answered"], ["26", "-", "not measured"]]
    other = replace(answers, measured={"bubble": 20, "ticks": 24})
    assert "measured something else; here it is 25" in next(iter(verdicts(LESSON, other, here)))
    path = tmp_path / answers.file_name
    path.write_text(answers.to_json())
    assert read_answers(path) == answers
    for student, name in (("Łukasz 李", "Łukasz-李"), ("!?", "nobody")):
        assert replace(answers, student=student).file_name == f"small-{name}.json"
    with pytest.raises(InputError, match=r"show-schedule gpipe --stages 0: failed: .*--stages 0: must be at least 1"):
        replace(LESSON, commands={"plan": "show-schedule gpipe --stages 0"}).run()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[" * 100_000,
        '{"lesson": 1, "student": "a", "guesses": {}, "measured": {}}',
        '{"lesson": "replicas\\n", "student": "a", "guesses": {}, "measured": {}}',
        f'{{"lesson": "replicas", "student": "a", "guesses": {{"loss": 1{"0" * 400}}}, "measured": {{}}}}',
    ],
    ids=lambda text: text[:20],
)
def test_what_is_not_answers_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ada" / "answers.json"
    file.parent.mkdir()
    with pytest.raises(InputError, match="has no file of answers"):
        check(Request(tmp_path))
    file.write_text(text)
    assert check(Request(tmp_path)) == 1
    told = capsys.readouterr().out
    assert f"# {file}: not a file of answers" in told
    assert "Answers" not in told, "the sentence is Python's"
    (tmp_path / "memory.json").write_text("[]")
    with pytest.raises(InputError, match=f"none of its 2 JSON files is a file of answers.*; the first: {file}: not a"):
        check(Request(tmp_path))
    (tmp_path / "memory.json").unlink()
    file.write_text(Answers("dance", "ada", {}, {}).to_json())
    file.with_name("other.json").write_text(Answers("song", "ada", {}, {}).to_json())
    assert run_subcommand("answers", [str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert all(f"# {name}: no such lesson; there are replicas, collectives" in told for name in ("dance", "song"))
    others = [tmp_path / "a.json", tmp_path / "b.json"]
    for one in others:
        one.write_text("{")
    assert check(Request(tmp_path)) == 1
    told = capsys.readouterr().out
    assert all(sentence in told for sentence in (*(f"# {one}: not a file" for one in others), "# dance: no such"))


PREDICTED: dict[str, dict[str, float]] = {  # by hand, from what each lesson says
    "replicas": {"loss": 0, "megabytes": 4 / 3 * 1.312, "activations": 1 / 3},
    "collectives": {"large": 14 / 1.75, "small": 14 / 6},
    "sharding": {"state": 1 / 3, "bytes": 1, "loss": 0},
    "pipelines": {"messages": 6, "bubble": 100 * 2 / 8, "activations": 3 / 6},
    "hybrid": {"loss": 0, "messages": 3, "both": 2},
    "slices": {"messages": 2 * 4, "weights": (262_144 + 65_824 / 2) / 327_968, "loss": 0},
    "context": {"activations": 1 / 2, "messages": 4, "loss": 0},
    "experts": {"messages": 4 * 2 * 2, "kilobytes": 16 * 32 * 32 * 4 / 1000, "load": 1},
    "faults": {"same": 0, "activations": 1 / 2},
}


@MARIMO
def test_the_index_links_to_all_apps_and_lessons() -> None:
    text, _ = outputs("index", None)
    paths = [f"{path}/" for path, _ in apps() if path not in ("/", "/lesson")]
    links = {*paths, *(f"/lesson/?name={each.name}" for each in all_lessons())}
    assert {*re.findall(r'href="\.(/[^"]*)"', text)} == links


def test_the_lessons_have_the_names_of_the_teaching_guide() -> None:
    guide = (LAB / "docs/teaching.md").read_text()
    assert [each.title for each in all_lessons()] == re.findall(r"^\| (\d\. .*?) \|", guide, re.MULTILINE)
    files = [f"{each.title.partition('.')[0]}_{each.name}" for each in all_lessons()]
    assert files == sorted(file.stem for file in LESSONS.glob("*.py"))


@MARIMO
def test_each_lesson_is_predicted_run_compared_handed_in_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, submissions = dict[str, Outcome](), tmp_path / "submissions"
    submissions.mkdir()

    def run_in_forks(command: str, _: Path) -> Outcome:
        """The real command, with ranks that need not import torch."""
        if command not in ran:
            words, out = shlex.split(command), tmp_path / f"run {len(ran)}"
            is_run = words[0] not in FUNCTIONS
            ended = fork_launcher(*words, *["--out", out, "--master-port", free_port()] * is_run).finish()
            assert ended.status == 0, ended.err
            ran[command] = Outcome(ended.out, read(out) if is_run else None)
        return ran[command]

    monkeypatch.setattr(lessons, "run_command", run_in_forks)
    assert [each.name for each in all_lessons()] == list(PREDICTED)
    for lesson, right in zip(all_lessons(), PREDICTED.values(), strict=True):
        already = len(ran)
        text, values = outputs("lesson", None, lesson=lesson)
        assert "Lock, and run the commands" in text
        assert not any(html.escape(each.why) in text for each in lesson.questions)
        assert len(ran) == already, "nothing runs before the guesses are locked"
        assert not {"outcomes", "measured"} & values.keys()
        wrong = {key: 2 * number + 1 for key, number in right.items()}
        for student, guesses, verdict in (("ada", right, "right"), ("bob", wrong, "off")):
            text, _ = outputs("lesson", {**guesses, "student": student}, lesson=lesson)
            assert re.findall(">(right|off)<", text) == [verdict] * len(right), (lesson.name, text)
            assert all(html.escape(each.why) in text for each in lesson.questions)
            [handed_in] = re.findall(r"data:application/json;base64,([\w+/=]+)", text)
            (submissions / student).mkdir(exist_ok=True)
            (submissions / student / f"{lesson.name}.json").write_bytes(b64decode(handed_in))
    assert check(Request(submissions)) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert {(line.split()[0], line.split()[2]) for line in lines} == {
        (name, key) for name, right in PREDICTED.items() for key in right
    }
    assert {(line.split()[1], line.split()[-1]) for line in lines} == {("ada", "right"), ("bob", "off")}
