"""Attempts at each exercise: typical mistakes with what the checker calls them, and other right solutions.

Each file has those of the catalogue's file of the same name.
"""

from support.attempts import collectives, experts, layers, pipelines, replicas, sequences

FILES = replicas, pipelines, layers, collectives, sequences, experts
ATTEMPTS = [(exercise, attempt) for file in FILES for exercise, some in file.ATTEMPTS.items() for attempt in some]
