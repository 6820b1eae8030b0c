"""What ranks talk through: where they stand, on what they compute, every message, and what is recorded of it.

Imports none of the other rooms.
"""
