"""Named axes: the layout of a run, a rank's groups along each axis, and the placement of each parameter.

May import `distlab.comm` and `distlab.machine`.
"""
