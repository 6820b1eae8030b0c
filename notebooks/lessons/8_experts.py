"""Lesson 8: experts."""

from distlab_playground.lessons import SMALL, Lesson, Question

LESSON = Lesson(
    name="experts",
    title="8. Experts",
    about=(
        "Each layer has four experts, two on each of two ranks, and each token goes to two of them. A rank "
        "has 32 tokens of 32 numbers in a step, and four layers."
    ),
    commands={
        "two": f"ep {SMALL} --world-size 2 --steps 5",
    },
    questions=(
        Question(
            key="messages",
            asks="How many times does a rank exchange rows of tokens with the other in a step?",
            read=lambda runs: runs["two"].messages("rows of experts"),
            why="In each of four layers: to the experts and back, forward and backward.",
        ),
        Question(
            key="kilobytes",
            asks="How many kB of rows does a rank send in a step, if half of them go to the other rank?",
            read=lambda runs: runs["two"].sent("rows of experts") / 1e3,
            why=(
                "16 exchanges of half of 32 tokens times 2 experts, of 32 numbers of 4 bytes: 65.5 kB. The router "
                "decides the rest."
            ),
            tolerance=0.1,
        ),
        Question(
            key="load",
            asks="How many tokens does the fullest expert of the first layer get, relative to the mean?",
            read=lambda runs: runs["two"].load,
            why=(
                "A router that has hardly been trained spreads the tokens nearly evenly. Later, corrections of its "
                "scores keep it so."
            ),
            tolerance=0.2,
        ),
    ),
)
