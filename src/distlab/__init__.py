"""The lab's parallel library, in rooms by role.

Each package says in its docstring what it is for and which of the others it may import; `lint-imports` checks it. From
the bottom up: `comm`; `collectives`, `parallel`, `pipeline` and `checkpoints`; `rendezvous` and `reports`; `run`;
`exchange`. The modules beside the packages are commands (`python -m distlab.show_schedule`), and `data_parallel`, which
has the names that the exercises import.
"""
