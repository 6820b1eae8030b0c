"""Checkpoints: what they are, and how they are found, written and read, in any layout.

May import `distlab.comm`.
"""
