"""Data and tensor parallelism: gradients in buckets, layers in slices.

May import `distlab.comm`.
"""
