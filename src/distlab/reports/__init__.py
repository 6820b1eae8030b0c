"""Reports on runs: traces, timelines, tables of memory, and the style of all figures.

May import all packages below `distlab.settings`.
"""

METRICS = "metrics.jsonl"  # in a run's folder, a line for each step
