"""What is left of a run to look at: traces, timelines, tables of memory, figures.

May import `distlab.pipeline`, `distlab.collectives` and `distlab.comm`.
"""
