"""Attempts at each exercise: typical mistakes with what the checker calls them, and other right solutions.

Each file has those of the catalogue's file of the same name.
"""

from support.attempts import collectives, layers, pipelines, replicas, sequences

ATTEMPTS = [*replicas.ATTEMPTS, *pipelines.ATTEMPTS, *layers.ATTEMPTS, *collectives.ATTEMPTS, *sequences.ATTEMPTS]
