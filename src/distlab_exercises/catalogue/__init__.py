"""The exercises: what one learns, what is taken out of which script, hints, and how a solution is tried.

To add one, name functions or classes of the chapter's script or of the library in one of these modules; tests do the
rest. Needs no torch.
"""

from distlab_exercises.catalogue import collectives, experts, layers, pipelines, replicas, sequences
from distlab_exercises.catalogue.exercise import USUAL, Exercise, OneProcess, Trial

EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for module in (replicas, pipelines, collectives, layers, sequences, experts)
    for exercise in module.EXERCISES
}

__all__ = ["EXERCISES", "USUAL", "Exercise", "OneProcess", "Trial"]
