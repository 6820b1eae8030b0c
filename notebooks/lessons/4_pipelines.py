"""Lesson 4: pipelines."""

import marimo

app = marimo.App(app_title="Lesson 4. Pipelines")

with app.setup:
    import marimo as mo

    from distlab_playground import classroom
    from distlab_playground.lessons import SMALL, Lesson, Question, held, messages, printed, ratio

    LESSON = Lesson(
        name="pipelines",
        title="4. Pipelines",
        about=(
            "Three stages, and a batch of six sequences in six micro-batches: first all forward passes and then "
            "all backward passes (GPipe), or one backward and one forward alternately (DAPPLE)."
        ),
        commands={
            "gpipe": f"pp-gpipe {SMALL} --batch-size 6 --micro-batches 6 --steps 5",
            "dapple": f"pp-dapple {SMALL} --batch-size 6 --micro-batches 6 --steps 5",
            "plan": "show-schedule gpipe --stages 3 --micro-batches 6",
        },
        questions=(
            Question(
                key="messages",
                asks="How many messages with activations does rank 0 send in a step?",
                read=messages("gpipe", "activations"),
                why="One for each micro-batch, to the next stage, whatever the schedule.",
            ),
            Question(
                key="bubble",
                asks="For what percentage of a step is a worker idle with GPipe, if all stages take the same time?",
                read=printed("plan", r"formula .*: ([\d.]+)%"),
                why="(p - 1) / (m + p - 1) with p = 3 stages and m = 6 micro-batches. DAPPLE has the same bubble.",
            ),
            Question(
                key="activations",
                asks="How large are the activations that rank 0 keeps with DAPPLE, relative to GPipe?",
                read=ratio(held("dapple", "activations"), held("gpipe", "activations")),
                why="The first of p stages runs at most p micro-batches ahead: 3 of 6.",
            ),
        ),
    )


@app.cell
def _():
    guesses, lock = mo.state(None, allow_self_loops=True)
    return guesses, lock


@app.cell
def _(guesses, lock):
    asked = classroom.predict(LESSON, guesses, lock)
    asked
    return (asked,)


@app.cell
def _(guesses):
    mo.stop(guesses() is None)
    outcomes = classroom.run(LESSON)
    measured = LESSON.measured(outcomes)
    return measured, outcomes


@app.cell
def _(guesses, measured, outcomes):
    remarks = mo.ui.text_area(label="What did you not expect, and why is it so?", full_width=True)
    mo.vstack([mo.Html(classroom.compare(LESSON, guesses(), measured)), classroom.output(outcomes), remarks])
    return (remarks,)


@app.cell
def _(guesses, measured, remarks):
    classroom.hand_in(LESSON, guesses(), measured, remarks.value)
    return


if __name__ == "__main__":
    app.run()
