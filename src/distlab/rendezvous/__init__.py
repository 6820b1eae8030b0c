"""How ranks and machines find each other, agree on settings, and report why they exit.

May import `distlab.axes`, `distlab.comm` and `distlab.machine`.
"""
