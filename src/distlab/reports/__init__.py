"""Reports on runs: traces, timelines, tables of memory, figures.

May import all packages below `distlab.settings`.
"""
