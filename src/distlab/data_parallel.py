"""The names that the exercises import: `MyDP` and `check_parameter_closeness` of `distlab.parallel.data`."""

from distlab.parallel.data import MyDP, check_parameter_closeness

__all__ = ["MyDP", "check_parameter_closeness"]
