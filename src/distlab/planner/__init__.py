"""Predicts what a layout of a training run costs on a machine: its memory, and the time of a step.

May import `pipeline`, `parallel`, `collectives` and `comm`. Only `measuring` needs torch.
"""
