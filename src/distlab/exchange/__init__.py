"""Models that come from elsewhere or go there: import, export, and reading a model wherever it is kept.

May import every other room.
"""
