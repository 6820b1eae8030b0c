"""The names that the exercises import, of `distlab.parallel`: `MyDP` and `check_parameter_closeness`."""

from distlab.parallel.data import MyDP
from distlab.parallel.same_model import check_parameter_closeness

__all__ = ["MyDP", "check_parameter_closeness"]
