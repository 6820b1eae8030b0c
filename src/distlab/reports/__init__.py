"""Reports on runs: traces, timelines, tables of memory, and the style of all figures.

May import all packages below `distlab.settings`.
"""
