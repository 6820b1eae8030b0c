"""Lesson 4: pipelines."""

from distlab_playground.lessons import SMALL, Lesson, Question

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
            read=lambda runs: runs["gpipe"].messages("activations"),
            why="One for each micro-batch, to the next stage, whatever the schedule.",
        ),
        Question(
            key="bubble",
            asks="For what percentage of a step is a worker idle with GPipe, if all stages take the same time?",
            read=lambda runs: runs["plan"].printed(r"formula .*: ([\d.]+)%"),
            why="(p - 1) / (m + p - 1) with p = 3 stages and m = 6 micro-batches. DAPPLE has the same bubble.",
        ),
        Question(
            key="activations",
            asks="How large are the activations that rank 0 keeps with DAPPLE, relative to GPipe?",
            read=lambda runs: runs["dapple"].held("activations") / runs["gpipe"].held("activations"),
            why="The first of p stages runs at most p micro-batches ahead: 3 of 6.",
        ),
    ),
)
