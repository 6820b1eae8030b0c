"""A run from the join of its ranks to its exit status: steps, logs, validation, checkpoints, failure.

May import all packages except `distlab.exchange` and `distlab.launching`.
"""
