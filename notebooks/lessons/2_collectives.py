"""Lesson 2: collectives."""

from distlab_playground.lessons import Lesson, Question

NAIVE, TREE, RING = (rf"all-reduce +{topology} +" for topology in ("naive", "tree", "ring"))
SMALLEST, LARGE = r"([\d.]+)", r"[\d.]+ +([\d.]+)"  # the columns of 4 kB and of 4 MB

LESSON = Lesson(
    name="collectives",
    title="2. Collectives",
    about=(
        "An all-reduce between eight computers with 10 Gbit/s each and 20 µs for a message, of 4 kB and of 4 "
        "MB, by simulation of every message."
    ),
    commands={
        "costs": "collective-costs 8 --kilobytes 4 4000",
    },
    questions=(
        Question(
            key="large",
            asks="4 MB: how many times as long does the naive all-reduce take as the ring's?",
            read=lambda runs: runs["costs"].printed(NAIVE + LARGE) / runs["costs"].printed(RING + LARGE),
            why=(
                "The root receives 7 tensors and sends 7, one after another: 14 times 4 MB. In the ring, every "
                "link carries 14 parts of 4 / 8 MB at the same time: 1.75 times 4 MB."
            ),
            tolerance=0.1,
        ),
        Question(
            key="small",
            asks="4 kB: how many times as long does the ring's all-reduce take as the tree's?",
            read=lambda runs: runs["costs"].printed(RING + SMALLEST) / runs["costs"].printed(TREE + SMALLEST),
            why="Small messages cost their latency: the ring sends 14 in a row, the tree 3 up and 3 down.",
            tolerance=0.2,
        ),
    ),
)
