"""The ways in which a group's tensors travel: shared memory, queues in it, several hosts, gloo and NCCL.

`distlab.comm.group` asks them in turn, and imports them for groups of more than one rank only.
"""
