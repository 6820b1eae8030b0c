"""Exercises made from the chapters' scripts, and a checker that compares what is handed in with one process.

`catalogue` lists the exercises, `skeleton` writes their files, and `commands` has `exercise`, `hint` and `check`.
These three work without torch. `checker` runs a file: `loading` imports it, and `ranks` forks its ranks.
`training` tries a script, `comparison` compares it with one process, and `shares` finds out what is wrong with a
gradient. `schedules`, `collectives`, `programs`, `layers`, `classifier`, `checkpoints` and `over_mpi` try functions.

May import `distlab`, but not `distlab_planner`, and no script of a chapter.
"""
