"""A lesson: predict, run the real commands, compare, hand in. The address names the first, as in `?name=replicas`."""

import marimo

app = marimo.App(app_title="A lesson")

with app.setup:
    import marimo as mo

    from distlab_playground import classroom, lessons
    from simplellm.errors import InputError


@app.cell
def _():
    try:
        _first = lessons.find_lesson(mo.query_params().get("name", "replicas"))
    except InputError as error:
        mo.stop(True, mo.callout(mo.md(str(error)), kind="warn"))
    _known = {each.title: each for each in lessons.all_lessons()}
    chosen = mo.ui.dropdown(_known, value=_first.title, label="lesson")
    chosen
    return (chosen,)


@app.cell
def _(chosen):
    lesson = chosen.value  # another lesson has other guesses
    locked, lock = mo.state(None, allow_self_loops=True)
    return lesson, lock, locked


@app.cell
def _(lesson, lock, locked):
    asked = classroom.predict(lesson, locked, lock)
    asked
    return (asked,)


@app.cell
def _(lesson, locked):
    mo.stop(locked() is None)
    outcomes = classroom.run(lesson)
    measured = lesson.measured(outcomes)
    remarks = mo.ui.text_area(label="What did you not expect, and why is it so?", full_width=True)
    return measured, outcomes, remarks


@app.cell
def _(lesson, locked, measured, outcomes, remarks):
    mo.vstack([mo.Html(classroom.compare(lesson, locked(), measured)), classroom.output(outcomes), remarks])
    return


@app.cell
def _(lesson, locked, measured, remarks):
    classroom.hand_in(lesson, locked(), measured, remarks.value)
    return


if __name__ == "__main__":
    app.run()
