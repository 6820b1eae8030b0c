"""Lesson 9: faults."""

import marimo

app = marimo.App(app_title="Lesson 9. Faults")

with app.setup:
    import marimo as mo

    from distlab_playground import classroom
    from distlab_playground.lessons import SMALL, Lesson, Question, held, loss, ratio, same

    LESSON = Lesson(
        name="faults",
        title="9. Faults",
        about=(
            "An exhibit of the museum, with one silent fault: the same batch, in one micro-batch and in two. A "
            "correct program gives the same loss."
        ),
        commands={
            "whole": f"museum/accumulation/accumulation.py {SMALL} --micro-batches 1 --steps 5",
            "halves": f"museum/accumulation/accumulation.py {SMALL} --micro-batches 2 --steps 5",
        },
        questions=(
            Question(
                key="same",
                asks="Are the losses of the fifth step equal to five digits? 1 for yes, 0 for no.",
                read=same(loss("whole"), loss("halves")),
                why=(
                    "The exhibit divides by the tokens of each micro-batch: those of a short one count too much. Both "
                    "losses fall, so nothing shows it until two runs are compared."
                ),
            ),
            Question(
                key="activations",
                asks="How large are the activations with two micro-batches, relative to one?",
                read=ratio(held("halves", "activations"), held("whole", "activations")),
                why="This is what micro-batches are for: half of the rows at a time.",
                tolerance=0.05,
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
