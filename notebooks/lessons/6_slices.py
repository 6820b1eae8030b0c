"""Lesson 6: layers in slices."""

import marimo

app = marimo.App(app_title="Lesson 6. Layers in slices")

with app.setup:
    import marimo as mo

    from distlab_playground import classroom
    from distlab_playground.lessons import SMALL, Lesson, Question, difference, held, loss, messages, ratio

    LESSON = Lesson(
        name="slices",
        title="6. Layers in slices",
        about=(
            "Two ranks hold one half of every layer each. The embedding and the output layer, 262,144 of the "
            "327,968 weights, are whole on both."
        ),
        commands={
            "one": f"primer {SMALL} --batch-size 3 --steps 5",
            "two": f"tp {SMALL} --world-size 2 --batch-size 3 --steps 5",
        },
        questions=(
            Question(
                key="messages",
                asks=(
                    "How many times does a rank add up activations with the other in a forward pass through the four "
                    "layers?"
                ),
                read=messages("two", "layer activations"),
                why=(
                    "Once after the attention and once after the feed-forward network of each layer; the backward "
                    "pass does so as often."
                ),
            ),
            Question(
                key="weights",
                asks="Which share of the model's weights does a rank hold?",
                read=ratio(held("two", "parameters"), held("one", "parameters")),
                why=(
                    "All of the embedding and of the output layer, half of the rest: small models gain little, large "
                    "ones nearly a half."
                ),
            ),
            Question(
                key="loss",
                asks="By how much do the losses of the fifth step differ?",
                read=difference(loss("two"), loss("one")),
                why="Sums of halves are the whole; only rounding differs.",
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
