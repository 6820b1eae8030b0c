"""Lesson 1: replicas."""

from distlab_playground.lessons import SMALL, Lesson, Question

LESSON = Lesson(
    name="replicas",
    title="1. Replicas",
    about=(
        "One process trains on three sequences in a step; then three ranks train on one each, and average "
        "their gradients. The model has 327,968 weights in float32: 1.31 MB."
    ),
    commands={
        "one": f"primer {SMALL} --batch-size 3 --steps 5",
        "three": f"dp-ga {SMALL} --world-size 3 --steps 5",
    },
    questions=(
        Question(
            key="loss",
            asks="By how much do the losses of the fifth step differ?",
            read=lambda runs: abs(runs["one"].loss - runs["three"].loss),
            why=(
                "It is the same training run: the mean of three means of equal size is the mean of all. Only "
                "rounding differs."
            ),
            least=1e-4,
        ),
        Question(
            key="megabytes",
            asks="How many MB of gradients does rank 0 send in a step?",
            read=lambda runs: runs["three"].sent("gradients") / 1e6,
            why="Around a ring of n ranks, each sends 2 (n - 1) / n times the gradients: 4/3 of 1.31 MB.",
        ),
        Question(
            key="activations",
            asks="How large are the activations that rank 0 keeps, relative to those of the one process?",
            read=lambda runs: runs["three"].held("activations") / runs["one"].held("activations"),
            why=(
                "They grow with the sequences of a rank: one of three. Weights, gradients and Adam's state are "
                "whole on every rank."
            ),
        ),
    ),
)
