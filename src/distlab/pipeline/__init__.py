"""Pipeline parallelism: schedules as data, their simulation, and the executor that runs them.

May import `distlab.axes`, `distlab.comm` and `distlab.machine`.
"""
