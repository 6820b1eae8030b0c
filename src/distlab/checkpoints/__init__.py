"""Checkpoints: their format, and how they are found, written and read in any layout.

May import `distlab.axes`, `distlab.comm` and `distlab.machine`.
"""

FOLDER = "checkpoints"  # in a run's folder
LLAMA = "llama"  # the architecture of a record that names none; all others are classifiers
