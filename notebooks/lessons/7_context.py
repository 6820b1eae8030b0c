"""Lesson 7: long context."""

import marimo

app = marimo.App(app_title="Lesson 7. Long context")

with app.setup:
    import marimo as mo

    from distlab_playground import classroom
    from distlab_playground.lessons import SMALL, Lesson, Question, difference, held, loss, messages, ratio

    LESSON = Lesson(
        name="context",
        title="7. Long context",
        about=("Two ranks share each sequence: a rank holds half of its tokens, and needs the keys and values of all."),
        commands={
            "one": f"primer {SMALL} --batch-size 1 --steps 5",
            "two": f"cp {SMALL} --world-size 2 --steps 5",
        },
        questions=(
            Question(
                key="activations",
                asks=(
                    "How large are the activations that a rank keeps, relative to one process with the whole sequence?"
                ),
                read=ratio(held("two", "activations"), held("one", "activations")),
                why="Half of the tokens, and a little more: the keys and values of the other half.",
                tolerance=0.1,
            ),
            Question(
                key="messages",
                asks="How many times does a rank send keys and values in a step, with four layers?",
                read=messages("two", "keys and values"),
                why="Once in the attention of each layer; their gradients return in the backward pass.",
            ),
            Question(
                key="loss",
                asks="By how much do the losses of the fifth step differ?",
                read=difference(loss("two"), loss("one")),
                why="Each token sees the same keys and values, wherever they are.",
                least=1e-4,
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
