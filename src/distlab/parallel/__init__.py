"""Data and tensor parallelism: gradients in buckets, layers in shards.

May import `distlab.comm`.
"""
