"""Exercises made from the chapters' scripts, and a checker that compares what is handed in with one process.

`catalogue` lists the exercises, `skeleton` writes their files, and `commands` has `./launch.sh exercise`, `hint` and
`check`. These three work without torch. `checker` runs a file: `ranks` forks its ranks, `training`, `schedules` and
`collectives`, `programs` and `over_mpi` try it, and `shares` finds out what is wrong with a gradient.

May import all other packages of `distlab`, but no script of a chapter.
"""
