"""Exercises made from the chapters' scripts, and a checker that compares what is handed in with one process.

`catalogue` lists the exercises, `skeleton` writes their files, `submissions` tells which file solves which, and
`commands` has `exercise`, `hint`, `check` and `grade`. These work without torch until a file is checked. `checker` runs
a file, and `grading` the files of a course: `loading` imports it, and `ranks` forks its ranks (`forked`), which raise
mistakes (`verdict`). `training` tries a script, which records its gradients and weights as with `--record-gradients`,
and `comparison` compares these with one process by means of `distlab_compare`. `schedules`, `collectives`, `programs`,
`layers`, `classifier`, `checkpoints`, `attention`, `experts` and `over_mpi` try functions. `exhibits` lists the
museum's scripts, `finding` has `find`, and `museum` tries a corrected one.

May import `distlab`, `distlab_compare` and `simplellm`, but not `distlab_planner`, and no script of a chapter.
"""
