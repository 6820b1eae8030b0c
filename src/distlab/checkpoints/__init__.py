"""Checkpoints: their format, and how they are found, written and read in any layout.

May import `distlab.comm`.
"""
