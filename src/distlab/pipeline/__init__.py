"""Pipeline parallelism: schedules as data, their simulation, and the executor that carries them out.

May import `distlab.comm`.
"""
