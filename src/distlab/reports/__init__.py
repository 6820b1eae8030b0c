"""Reports on runs: traces, timelines, tables of memory, figures.

May import `distlab.pipeline`, `distlab.collectives` and `distlab.comm`.
"""
