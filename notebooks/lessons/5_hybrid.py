"""Lesson 5: all at once."""

from distlab_playground.lessons import SMALL, Lesson, Question

LESSON = Lesson(
    name="hybrid",
    title="5. All at once",
    about=(
        "Two pipelines of three stages, each with three micro-batches of one sequence; one process takes the "
        "same six sequences in a step."
    ),
    commands={
        "six": f"hybrid {SMALL} --batch-size 3 --steps 5",
        "one": f"primer {SMALL} --batch-size 6 --steps 5",
    },
    questions=(
        Question(
            key="loss",
            asks="By how much do the losses of the fifth step differ?",
            read=lambda runs: abs(runs["six"].loss - runs["one"].loss),
            why=(
                "The replicas of a stage average its gradients, and the stages pass on exactly what one process "
                "computes."
            ),
            least=1e-4,
        ),
        Question(
            key="messages",
            asks="How many messages with activations does rank 0 send in a step?",
            read=lambda runs: runs["six"].messages("activations"),
            why="One for each micro-batch of its own pipeline.",
        ),
        Question(
            key="both",
            asks="How many of the six ranks send both activations and gradients of activations?",
            read=lambda runs: runs["six"].ranks_that_send("activations", "gradients of activations"),
            why=(
                "The middle stage of each pipeline: the first has nobody to send gradients to, the last nobody to "
                "send activations to."
            ),
        ),
    ),
)
