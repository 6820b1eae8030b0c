"""The lessons: their numbers are those of the records, their commands run, and what a class hands in is checked."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.quoted_commands import launched

from distlab.subcommands import run_subcommand
from distlab_playground.answers import Request, check, verdicts
from distlab_playground.lessons import (
    LESSONS,
    Answers,
    Lesson,
    Outcome,
    Question,
    both,
    difference,
    find_lesson,
    held,
    loss,
    messages,
    printed,
    ratio,
    read_answers,
    sent,
)
from simplellm.errors import InputError

LESSON = Lesson(
    name="small",
    title="",
    about="",
    commands={"plan": "show-schedule gpipe --stages 3 --micro-batches 6"},
    questions=(
        Question("bubble", "", printed("plan", r"formula .*: ([\d.]+)%"), ""),
        Question("ticks", "", printed("plan", r"(\d+) ticks"), "", tolerance=0, least=2),
    ),
)
MARIMO = pytest.mark.skipif(find_spec("marimo") is None, reason="lessons need marimo: requirements-playground.txt")


def outcome(folder: Path, losses: list[float], scale: int) -> Outcome:
    """Of a run of two ranks: rank 0 sends a message in each of two steps, rank 1 two of them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"settings": {}, "layout": {"dp": 2}}))
    steps = [json.dumps({"step": step, "loss": loss, "seconds": 1.0}) for step, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("\n".join(steps) + "\n")
    way = {"kind": "gradients", "bytes": 100 * scale, "messages": 2, "peers": [1]}
    other = {"kind": "loss", "bytes": 1, "messages": 1, "peers": [1]}
    more = {"steps": 2, "seconds": 1.0, "waited_seconds": 0.0, "collective_seconds": 0.0}
    accounts = [{"name": f"rank {r}", "rank": r, **more, "sent": [way, other][: 2 - r]} for r in (0, 1)]
    (folder / "ledger.json").write_text(json.dumps(accounts))
    (folder / "memory.json").write_text(json.dumps([{"activations": 8 * scale}, {"activations": 1}]))
    return Outcome(folder, "")


def test_numbers_are_read_from_the_records(tmp_path: Path) -> None:
    runs = {"a": outcome(tmp_path / "a", [3.0, 2.0], 1), "b": outcome(tmp_path / "b", [3.0, 1.5], 3)}
    assert sent("b", "gradients")(runs) == 150
    assert messages("b", "gradients")(runs) == 1
    assert both("a", "gradients", "loss")(runs) == 1
    assert ratio(held("b", "activations"), held("a", "activations"))(runs) == 3
    assert difference(loss("a"), loss("b"))(runs) == 0.5
    with pytest.raises(InputError, match="a: rank 0 sent no weights"):
        sent("a", "weights")(runs)
    with pytest.raises(InputError, match="its output has no"):
        printed("a", "ticks")(runs)


def test_a_lesson_runs_its_commands_and_its_answers_are_judged(tmp_path: Path) -> None:
    here = LESSON.measured(LESSON.run(tmp_path))
    assert here == {"bubble": 25, "ticks": 24}
    answers = Answers("small", "ada", {"bubble": 25.2, "ticks": 21}, here)
    assert [line.split()[-1] for line in verdicts(LESSON, answers, here)] == ["right", "off"]
    other = replace(answers, guesses={"ticks": 26}, measured={"bubble": 24})
    last = [line.partition("  ")[2].split("  ")[-1] for line in verdicts(LESSON, other, here)]
    assert last == ["not answered", "not measured"]
    other = replace(answers, measured={"bubble": 24, "ticks": 24})
    assert "measured something else; here it is 25" in next(iter(verdicts(LESSON, other, here)))
    path = tmp_path / answers.file_name
    path.write_text(answers.to_json())
    assert read_answers(path) == answers
    assert replace(answers, student="Łukasz 李").file_name == "small-Łukasz-李.json"
    with pytest.raises(InputError, match=r"show-schedule gpipe --stages 0: failed: .*--stages 0: must be at least 1"):
        replace(LESSON, commands={"plan": "show-schedule gpipe --stages 0"}).run(tmp_path)


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
    file = tmp_path / "ada.json"
    with pytest.raises(InputError, match="has no file of answers"):
        check(Request(tmp_path))
    file.write_text(text)
    assert check(Request(tmp_path)) == 1
    assert f"# {file}: not a file of answers" in capsys.readouterr().out
    file.write_text(Answers("dance", "ada", {}, {}).to_json())
    assert run_subcommand("answers", [str(tmp_path)]) == 1
    assert "# dance: no such lesson; there are replicas, collectives" in capsys.readouterr().out


@MARIMO
def test_every_lesson_asks_scripts_for_what_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [file.stem.partition("_")[2] for file in sorted(LESSONS.glob("*.py"))]
    assert len(names) == 9
    for name in names:
        lesson = find_lesson(name)
        assert lesson.name == name
        for command in lesson.commands.values():
            launched(command.split())
