"""Predicts what a layout of a training run costs on a machine: its memory, and the time of a step.

`machine` is a machine's file, which the command `calibrate` measures with `measuring`. The command `plan` lists layouts
(`layouts`), predicts the memory and the step of each (`memory`, `step`), and keeps the fastest (`search`); `prediction`
does so for a run with `--machine`. `collective_model` predicts handwritten collectives by simulating their messages,
with the costs of `collective_probes`. Planning needs no torch.

May import `distlab`, but not `distlab_exercises`.
"""
