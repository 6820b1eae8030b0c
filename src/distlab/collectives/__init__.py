"""Handwritten collective operations, and a simulated world in which they can run.

May import `distlab.axes`, `distlab.comm` and `distlab.machine`.
"""

from distlab.collectives.algorithms import (
    ALL_REDUCES,
    allgather_naive,
    allgather_ring,
    allgather_tree,
    allreduce_butterfly,
    allreduce_naive,
    allreduce_ring,
    allreduce_tree,
    alltoall_naive,
    alltoall_pairwise,
    broadcast_naive,
    broadcast_ring,
    broadcast_tree,
    gather_naive,
    gather_tree,
    reduce_naive,
    reduce_tree,
    reducescatter_naive,
    reducescatter_ring,
    shift,
)
