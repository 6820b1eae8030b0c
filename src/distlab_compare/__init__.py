"""The first step, parameter, rank and factor at which two runs of the same training part: `distlab compare`.

`records` reads the gradients and weights that a run has recorded (`distlab.run.recording`), `runs` compares those of
two runs, `saved` their checkpoints. `differences` and `mistakes` name the mistake behind a wrong tensor. The checker of
the exercises compares the runs of students in the same way.

May import `distlab` and `simplellm`.
"""
