"""Lesson 9: faults."""

import math

from distlab_playground.lessons import SMALL, Lesson, Question

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
            read=lambda runs: math.isclose(runs["whole"].loss, runs["halves"].loss, rel_tol=1e-5),
            why=(
                "The exhibit divides by the tokens of each micro-batch: those of a short one count too much. Both "
                "losses fall, so nothing shows it until two runs are compared."
            ),
        ),
        Question(
            key="activations",
            asks="How large are the activations with two micro-batches, relative to one?",
            read=lambda runs: runs["halves"].held("activations") / runs["whole"].held("activations"),
            why="This is what micro-batches are for: half of the rows at a time.",
            tolerance=0.05,
        ),
    ),
)
