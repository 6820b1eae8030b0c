"""The lab's parallel library: one package for each role.

The docstring of each package says what it is for and which other packages it may import; `lint-imports` checks this.
The layers, from the bottom up: `comm`; `collectives`, `parallel`, `pipeline` and `checkpoints`; `planner`,
`rendezvous` and `reports`; `run`; `exchange`. The modules next to the packages are commands (`python -m
distlab.show_schedule`), except `data_parallel`, which defines the names that the exercises import.
"""
