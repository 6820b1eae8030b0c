"""The parts of a lesson's notebook: its questions, the comparison, the file to hand in."""

import html
import textwrap
from collections.abc import Mapping
from typing import Any

from distlab_playground import drawing
from distlab_playground.guesses import Lock, Locked, missing
from distlab_playground.lessons import Answers, Lesson, Outcome
from simplellm.errors import InputError


def predict(lesson: Lesson, locked: Locked, lock: Lock) -> Any:
    """Return the questions with fields for a name and guesses; the guesses alone once they are locked."""
    import marimo as mo

    guesses = locked()
    commands = "\n".join(map(_folded, lesson.shown()))
    begin = f"# {lesson.title}\n\n{lesson.about}\n\n```sh\n{commands}\n```\n\n"
    if guesses is not None:
        asked = "\n".join(f"- {each.asks} **{guesses[each.key]:,g}**" for each in lesson.questions)
        return mo.md(f"{begin}Locked:\n\n{asked}")
    fields = {each.key: mo.ui.number(step=0.0001, label=each.asks) for each in lesson.questions}
    name = mo.ui.text(label="Your name, for the file to hand in")
    asked = "\n\n".join(f"{{{key}}}" for key in (*fields, "student"))
    form = mo.md(f"{begin}Before they run (ratios and shares as numbers, such as 0.5):\n\n{asked}")
    return form.batch(**fields, student=name).form(
        submit_button_label="Lock, and run the commands", validate=missing, on_change=lock
    )


def _folded(command: str) -> str:
    """Return a command in lines that a page has room for."""
    lines = textwrap.wrap(command, 76, break_long_words=False, break_on_hyphens=False)
    return " \\\n    ".join(lines)


def run(lesson: Lesson) -> dict[str, Outcome]:
    """Run the lesson's commands, and show that they run."""
    import marimo as mo

    with mo.status.spinner(title=f"{' and '.join(lesson.shown())}: some seconds"):
        try:
            return lesson.run()
        except InputError as error:
            mo.stop(True, mo.callout(mo.md(str(error)), kind="danger"))
            raise


def compare(lesson: Lesson, guesses: Mapping[str, Any], measured: Mapping[str, float]) -> str:
    """Return the guesses beside the measured numbers, as HTML."""
    lines, reasons = [], []
    for each in lesson.questions:
        guess, number = guesses[each.key], measured[each.key]
        lines.append((each.key, f"{guess:,g}", f"{number:,.6g}", "right" if each.is_right(guess, number) else "off"))
        reasons.append(f"<li><b>{html.escape(each.key)}</b>: {html.escape(each.why)}</li>")
    shown = drawing.table(["question", "guess", "measured", ""], lines, "Predicted and measured")
    return f"{shown}<ul>{''.join(reasons)}</ul>"


def output(outcomes: Mapping[str, Outcome]) -> Any:
    """Return what the commands printed, folded."""
    import marimo as mo

    return mo.accordion({f"output: {name}": mo.plain_text(one.output[-6000:]) for name, one in outcomes.items()})


def hand_in(lesson: Lesson, guesses: Mapping[str, Any], measured: Mapping[str, float], remarks: str) -> Any:
    """Return a button that saves the answers as a file."""
    import marimo as mo

    own = {each.key: guesses[each.key] for each in lesson.questions}
    answers = Answers(lesson.name, guesses["student"], own, dict(measured), remarks)
    return mo.download(answers.to_json().encode(), filename=answers.file_name, label=f"Save {answers.file_name}")
