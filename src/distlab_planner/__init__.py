"""Predicts what a layout of a training run costs on a machine: its memory, and the time of a step.

May import `distlab`, but none of the exercises.
"""
