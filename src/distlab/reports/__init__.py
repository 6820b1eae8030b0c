"""Reports on runs: traces, timelines, tables of memory, figures.

May import all packages except `distlab.run` and `distlab.exchange`.
"""
