"""Lesson 7: long context."""

from distlab_playground.lessons import SMALL, Lesson, Question

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
            asks=("How large are the activations that a rank keeps, relative to one process with the whole sequence?"),
            read=lambda runs: runs["two"].held("activations") / runs["one"].held("activations"),
            why="Half of the tokens, and a little more: the keys and values of the other half.",
            tolerance=0.1,
        ),
        Question(
            key="messages",
            asks="How many times does a rank send keys and values in a step, with four layers?",
            read=lambda runs: runs["two"].messages("keys and values"),
            why="Once in the attention of each layer; their gradients return in the backward pass.",
        ),
        Question(
            key="loss",
            asks="By how much do the losses of the fifth step differ?",
            read=lambda runs: abs(runs["two"].loss - runs["one"].loss),
            why="Each token sees the same keys and values, wherever they are.",
            least=1e-4,
        ),
    ),
)
