"""Generators of inputs that cannot work, by kind, and what becomes of each: see `tests/bad_input.py`."""
