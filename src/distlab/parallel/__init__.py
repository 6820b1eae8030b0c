"""Data, tensor, context and expert parallelism: gradients in buckets, layers, sequences and experts in shards.

May import `distlab.axes`, `distlab.comm` and `distlab.machine`.
"""
