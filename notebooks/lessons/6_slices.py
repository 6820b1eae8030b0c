"""Lesson 6: layers in slices."""

from distlab_playground.lessons import SMALL, Lesson, Question

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
            read=lambda runs: runs["two"].messages("layer activations"),
            why=(
                "Once after the attention and once after the feed-forward network of each layer; the backward "
                "pass does so as often."
            ),
        ),
        Question(
            key="weights",
            asks="Which share of the model's weights does a rank hold?",
            read=lambda runs: runs["two"].held("parameters") / runs["one"].held("parameters"),
            why=(
                "All of the embedding and of the output layer, half of the rest: small models gain little, large "
                "ones nearly a half."
            ),
        ),
        Question(
            key="loss",
            asks="By how much do the losses of the fifth step differ?",
            read=lambda runs: abs(runs["two"].loss - runs["one"].loss),
            why="Sums of halves are the whole; only rounding differs.",
            least=1e-4,
        ),
    ),
)
