"""A run from its command line to its exit status: settings, steps, logs, validation, checkpoints, failure.

May import all packages except `distlab.exchange`.
"""
