"""Lesson 3: libraries and sharding."""

from distlab_playground.lessons import SMALL, Lesson, Question

LESSON = Lesson(
    name="sharding",
    title="3. Libraries and sharding",
    about=(
        "Three replicas train with Adam: each keeps the optimizer's whole state (`dp-ga`), or a third of it "
        "(`dp-zero`)."
    ),
    commands={
        "whole": f"dp-ga {SMALL} --world-size 3 --steps 5",
        "sharded": f"dp-zero {SMALL} --world-size 3 --steps 5",
    },
    questions=(
        Question(
            key="state",
            asks="How large is the optimizer's state of rank 0 with dp-zero, relative to dp-ga?",
            read=lambda runs: runs["sharded"].held("optimizer state") / runs["whole"].held("optimizer state"),
            why="Each rank keeps the two moments of a third of the weights.",
        ),
        Question(
            key="bytes",
            asks=(
                "How many bytes of gradients and weights does rank 0 send in a step with dp-zero, relative to dp-ga?"
            ),
            read=lambda runs: (
                (runs["sharded"].sent("gradients") + runs["sharded"].sent("weights")) / runs["whole"].sent("gradients")
            ),
            why=(
                "An all-reduce is a reduce-scatter and an all-gather. dp-zero does the first with gradients and "
                "the second with the new weights: the same bytes."
            ),
        ),
        Question(
            key="loss",
            asks="By how much do the losses of the fifth step differ?",
            read=lambda runs: abs(runs["whole"].loss - runs["sharded"].loss),
            why="Sharding changes where a weight is updated, not how.",
            least=1e-4,
        ),
    ),
)
