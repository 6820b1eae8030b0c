"""Two runs beside each other: what a run records, and the first step and parameter at which two of them part.

May import `distlab.axes`, `distlab.checkpoints`, `distlab.comm` and `distlab.machine`.
"""

RECORDED = "recorded"  # folder in a run's folder
